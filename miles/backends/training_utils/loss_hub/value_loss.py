"""The critic's loss: squared distance to the returns, with values clipped around those that the batch started from.

Source: the PPO implementation of OpenAI Baselines (Dhariwal et al. 2017); without its factor 1/2.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from miles.backends.training_utils.columns import MicroBatch
from miles.backends.training_utils.loss_hub.base import Objective, TokenLoss
from miles.backends.training_utils.loss_hub.reducers import StepTotals
from miles.backends.training_utils.metrics import StepMetrics


def clipped_value_loss(values: Tensor, old_values: Tensor, returns: Tensor, value_clip: float) -> TokenLoss:
    """max((V - G)^2, (V_old + clip(V - V_old, +-value_clip) - G)^2), per token; all `[R]`, V carries the gradient."""
    clipped_values = old_values + (values - old_values).clamp(-value_clip, value_clip)
    plain, clipped = (values - returns).square(), (clipped_values - returns).square()
    return TokenLoss(torch.maximum(plain, clipped), (clipped > plain).float())


def value_objective(args: Any, batch: MicroBatch, values: Tensor, totals: StepTotals) -> Objective:
    """The critic's contribution to the step, from its current values of the response tokens, flat fp32 `[R]`.

    The batch brings `values`, those of the critic before its first step, and `returns`.
    Raises: ValueError where it lacks one of them.
    """
    old_values, returns = batch.flat("values"), batch.flat("returns")
    if old_values is None or returns is None:
        lacking = "values" if old_values is None else "returns"
        raise ValueError(
            f"the value loss needs the column {lacking}: score the batch with the critic before training it"
        )
    finite = torch.isfinite(values.detach()) & torch.isfinite(old_values) & torch.isfinite(returns)
    valid = (batch.mask > 0) & finite
    # where, before any arithmetic: 0 x NaN is NaN, forward and backward.
    current, start, target = (torch.where(valid, x, 0.0) for x in (values, old_values, returns))
    token = clipped_value_loss(current, start, target, float(args.value_clip))
    norm = totals.normalizer(args)
    loss = batch.reducer(token.loss) / norm
    metrics = StepMetrics()
    metrics.add("train/loss", loss)
    metrics.add("train/value_loss", loss)
    metrics.add("train/value_clipfrac", batch.reducer(token.clipped) / norm)
    metrics.add_explained_variance("train/value_explained_variance", target[valid], start[valid])
    metrics.add("train/nonfinite_tokens", ((batch.mask > 0) & ~finite).sum())
    return Objective(loss, metrics)
