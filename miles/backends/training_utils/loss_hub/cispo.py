"""CISPO: the importance weight is clipped and detached, so that every token keeps a gradient.

Source: MiniMax-M1, 2025. The paper's range is `--eps-clip 1.0 --eps-clip-high 4.0`. Not one of the public estimators.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from miles.backends.training_utils.loss_hub.base import Estimator, TokenLoss, broadcast_reward
from miles.backends.training_utils.loss_hub.policy_loss import clip_range, ratio_of


def clipped_importance_loss(args: Any, log_ratio: Tensor, advantages: Tensor, log_probs: Tensor) -> TokenLoss:
    """-clip(ratio) A log p, the weight detached: the gradient flows through log p alone."""
    low, high = clip_range(args)
    ratio = ratio_of(log_ratio).detach()
    weight = ratio.clamp(low, high)
    return TokenLoss(-weight * advantages * log_probs, (weight != ratio).float())


CISPO = Estimator(
    name="cispo",
    advantages=broadcast_reward,
    token_loss=clipped_importance_loss,
    centers_rewards=True,
    scales_rewards=True,
)
