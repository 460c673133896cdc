"""How per-token values become one number: the reducers, and what they are divided by.

A reducer returns a *sum* over its samples; the step's normaliser divides it. So contributions of micro-batches and
ranks simply add up, and neither gradients nor logged values depend on the split:

- default: a reducer gives `sum_i sum_t x m / D_i`, D_i the trainable tokens of the whole rollout that sample i belongs
  to; the normaliser is the rollouts of the step. Siblings of one execution make one token-weighted mean.
- `--calculate-per-token-loss`: `sum_i sum_t x m`; the normaliser is the trainable tokens of the step.

Sources: Shao et al. 2024, DeepSeekMath (mean of samples' means); Yu et al. 2025, DAPO (mean over tokens).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from miles.utils.imports import load_function

Reducer = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class StepTotals:
    """Totals of the optimizer step over all ranks and micro-batches; `correction`: what the correction asked for, `[k]`."""

    num_rollouts: int
    num_tokens: int
    correction: Tensor | None = None

    def normalizer(self, args: Any) -> float:
        """What a sum of reducer values is divided by. At least 1, so that a step without tokens has loss 0."""
        per_token = getattr(args, "calculate_per_token_loss", False)
        return float(max(self.num_tokens if per_token else self.num_rollouts, 1))


class RolloutMean:
    """The reducer of both modes. Masked positions may hold anything, NaN included: they are never read.

    Attributes:
        mask: `[R]`, 1.0 at trainable tokens.
        weight: `[R]`, what each token's value is multiplied by.
    """

    def __init__(self, loss_masks: Sequence[Tensor], rollout_mask_sums: Sequence[float], per_token: bool) -> None:
        self.mask = torch.cat([m.float() for m in loss_masks])
        if per_token:
            self.weight = self.mask
        else:
            scaled = [m.float() / max(float(s), 1.0) for m, s in zip(loss_masks, rollout_mask_sums, strict=True)]
            self.weight = torch.cat(scaled)

    def __call__(self, x: Tensor) -> Tensor:
        """Reduce `[R]` to a scalar."""
        if x.shape != self.weight.shape:
            raise ValueError(f"the reducer got {tuple(x.shape)} values for {self.weight.numel()} response tokens")
        return (torch.where(self.weight > 0, x, 0.0) * self.weight).sum()


def get_sum_of_sample_mean(
    total_lengths: Sequence[int],
    response_lengths: Sequence[int],
    loss_masks: Sequence[Tensor],
    calculate_per_token_loss: bool = False,
    rollout_mask_sums: Sequence[float] | None = None,
) -> Reducer:
    """The standard reducer over flat response values `[sum(response_lengths)]`.

    `rollout_mask_sums` default to each sample's own trainable tokens.
    """
    wrong = [i for i, (m, n) in enumerate(zip(loss_masks, response_lengths, strict=True)) if len(m) != n]
    if wrong:
        raise ValueError(f"loss masks of samples {wrong} are not as long as their responses")
    sums = [float(m.sum()) for m in loss_masks] if rollout_mask_sums is None else rollout_mask_sums
    return RolloutMean(loss_masks, sums, calculate_per_token_loss)


def pg_loss_reducer(
    args: Any,
    total_lengths: Sequence[int],
    response_lengths: Sequence[int],
    masks: Sequence[Tensor],
    rollout_mask_sums: Sequence[float],
) -> Reducer:
    """The reducer of the policy-gradient term: `--custom-pg-loss-reducer-function-path`, or the standard one.

    `masks` may have lost tokens that a correction rejected; denominators stay those of the whole rollout.
    """
    per_token = bool(getattr(args, "calculate_per_token_loss", False))
    path = getattr(args, "custom_pg_loss_reducer_function_path", None)
    if path is not None:
        return load_function(path)(total_lengths, response_lengths, masks, per_token)
    return RolloutMean(masks, rollout_mask_sums, per_token)
