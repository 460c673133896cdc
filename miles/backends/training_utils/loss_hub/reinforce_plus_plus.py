"""REINFORCE++: the discounted return of a KL-shaped reward. Source: Hu 2025.

Tokens that do not train (tool results, observations) are no steps of the decision process: they have no reward, no KL,
and the return passes them undiscounted.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from miles.backends.training_utils.loss_hub.base import (
    AdvantageInputs,
    Advantages,
    Estimator,
    discounted_suffix_sums,
)
from miles.backends.training_utils.loss_hub.policy_loss import clipped_surrogate


def discounted_returns(args: Any, inputs: AdvantageInputs) -> Advantages:
    """G_t = r_t + gamma G_{t+1} over trainable tokens, r_t = -kl_coef KL_t, plus the reward at the last of them.

    Masked positions get 0; a response without a trainable token gets zeros, and its reward reaches nothing.
    """
    returns = [
        _returns(args, float(reward), mask, kl)
        for reward, mask, kl in zip(inputs.rewards, inputs.loss_masks, inputs.kl, strict=True)
    ]
    return returns, list(returns)


def _returns(args: Any, reward: float, mask: Tensor, kl: Tensor) -> Tensor:
    trainable = mask > 0
    out = torch.zeros_like(mask)
    if not bool(trainable.any()):
        return out
    steps = -float(args.kl_coef) * kl[trainable]
    steps[-1] += reward
    out[trainable] = discounted_suffix_sums(steps, float(args.gamma))
    return out


REINFORCE_PLUS_PLUS = Estimator(
    name="reinforce_plus_plus",
    advantages=discounted_returns,
    token_loss=clipped_surrogate,
    needs_whitening=True,
)
