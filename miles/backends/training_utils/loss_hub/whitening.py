"""Advantage whitening over the whole rollout batch, all ranks together. Source: Hu 2025, REINFORCE++ (global batch)."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

# Sums an fp64 tensor over the ranks that hold different samples or tokens; returns the total.
AllReduceSum = Callable[[Tensor], Tensor]


def whiten(values: Sequence[Tensor], masks: Sequence[Tensor], all_reduce: AllReduceSum | None = None) -> list[Tensor]:
    """(x - mean) rsqrt(var + 1e-8), moments over trainable tokens of all ranks, variance with n / (n - 1). Collective.

    Every rank makes the same two reductions, one without a trainable token too. Masked positions are transformed
    alike, but what they hold enters no moment.
    Raises: ValueError, on every rank, where no token of the batch trains.
    """
    reduce = all_reduce or (lambda total: total)
    device = values[0].device if values else torch.device("cpu")
    count_sum = torch.zeros(2, dtype=torch.float64, device=device)
    for x, mask in zip(values, masks, strict=True):
        count_sum += torch.stack([(mask > 0).sum().double(), torch.where(mask > 0, x, 0.0).double().sum()])
    count, total = reduce(count_sum).tolist()
    mean = total / count if count else 0.0
    squares = torch.zeros(1, dtype=torch.float64, device=device)
    for x, mask in zip(values, masks, strict=True):
        squares += torch.where(mask > 0, x.double() - mean, 0.0).square().sum()
    spread = float(reduce(squares))
    if not count:
        raise ValueError("--normalize-advantages: no token of the rollout batch trains, every loss mask is zero")
    variance = spread / max(count - 1, 1)
    scale = (variance + 1e-8) ** -0.5
    return [((x.double() - mean) * scale).to(x.dtype) for x in values]
