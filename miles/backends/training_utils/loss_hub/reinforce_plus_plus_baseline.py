"""REINFORCE++ with the group's mean reward as baseline: centred reward minus KL at every token. Source: Hu 2025."""

from __future__ import annotations

from typing import Any

import torch

from miles.backends.training_utils.loss_hub.base import AdvantageInputs, Advantages, Estimator
from miles.backends.training_utils.loss_hub.policy_loss import clipped_surrogate


def centered_reward_minus_kl(args: Any, inputs: AdvantageInputs) -> Advantages:
    """R - kl_coef KL_t; the KL of masked positions counts as 0."""
    advantages = [
        float(reward) - float(args.kl_coef) * torch.where(mask > 0, kl, 0.0)
        for reward, mask, kl in zip(inputs.rewards, inputs.loss_masks, inputs.kl, strict=True)
    ]
    return advantages, list(advantages)


REINFORCE_PLUS_PLUS_BASELINE = Estimator(
    name="reinforce_plus_plus_baseline",
    advantages=centered_reward_minus_kl,
    token_loss=clipped_surrogate,
    centers_rewards=True,
    needs_whitening=True,
)
