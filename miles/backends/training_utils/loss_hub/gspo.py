"""GSPO: GRPO with one ratio a response, the geometric mean of its tokens' ratios. Source: Zheng et al. 2025."""

from miles.backends.training_utils.loss_hub.base import Estimator, broadcast_reward
from miles.backends.training_utils.loss_hub.policy_loss import clipped_surrogate

GSPO = Estimator(
    name="gspo",
    advantages=broadcast_reward,
    token_loss=clipped_surrogate,
    sequence_ratio=True,
    centers_rewards=True,
    scales_rewards=True,
)
