"""PPO: generalised advantage estimation with a critic's values. Source: Schulman et al. 2015 (GAE) and 2017 (PPO).

Only trainable tokens are steps of the decision process. Between two of them, however many observations lie there, there
is one transition: no reward, no value and no decay for what lies between.
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


def generalised_advantages(args: Any, inputs: AdvantageInputs) -> Advantages:
    """A_t = delta_t + gamma lambda A_{t+1} with delta_t = r_t + gamma V_{t+1} - V_t; returns A_t + V_t.

    t counts trainable tokens. The reward is r of the last of them, the value after it is 0, for a truncated response
    too. Masked positions get 0; a response without a trainable token gets zeros, and its reward reaches nothing.
    Raises: ValueError without values, and with `--kl-coef`, which has no place in the critic's returns.
    """
    if inputs.values is None:
        raise ValueError("--advantage-estimator ppo needs the critic's values (column values) of the batch")
    if getattr(args, "kl_coef", 0.0):
        raise ValueError(
            f"--kl-coef {args.kl_coef} does not work with --advantage-estimator ppo: use --use-kl-loss --kl-loss-coef"
        )
    advantages, returns = [], []
    for reward, mask, values in zip(inputs.rewards, inputs.loss_masks, inputs.values, strict=True):
        a, g = _of_response(args, float(reward), mask, values)
        advantages.append(a)
        returns.append(g)
    return advantages, returns


def _of_response(args: Any, reward: float, mask: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
    trainable = mask > 0
    advantages, returns = torch.zeros_like(mask), torch.zeros_like(mask)
    if not bool(trainable.any()):
        return advantages, returns
    gamma = float(args.gamma)
    v = values[trainable].double()
    delta = gamma * torch.cat([v[1:], v.new_zeros(1)]) - v
    delta[-1] += reward
    a = discounted_suffix_sums(delta, gamma * float(args.lambd))
    advantages[trainable] = a.to(mask.dtype)
    returns[trainable] = (a + v).to(mask.dtype)
    return advantages, returns


PPO = Estimator(
    name="ppo",
    advantages=generalised_advantages,
    token_loss=clipped_surrogate,
    needs_values=True,
)
