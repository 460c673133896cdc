"""GRPO: a sample's advantage is its reward relative to its group. Source: Shao et al. 2024, DeepSeekMath."""

from miles.backends.training_utils.loss_hub.base import Estimator, broadcast_reward
from miles.backends.training_utils.loss_hub.policy_loss import clipped_surrogate

GRPO = Estimator(
    name="grpo",
    advantages=broadcast_reward,
    token_loss=clipped_surrogate,
    centers_rewards=True,
    scales_rewards=True,
)
