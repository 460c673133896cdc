"""What an advantage estimator is: how rewards become advantages, and which per-token loss they enter. What a loss returns."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from miles.backends.training_utils.metrics import StepMetrics


@dataclass(frozen=True)
class AdvantageInputs:
    """One rank's samples, one entry each.

    `kl` is the per-token estimate against the reference, zeros without one; `values` are the critic's, None without one.
    """

    rewards: Sequence[float]
    loss_masks: Sequence[Tensor]  # fp32 [response]
    kl: Sequence[Tensor]  # fp32 [response]
    values: Sequence[Tensor] | None = None  # fp32 [response]


# (advantages, returns), fp32 [response] a sample
Advantages = tuple[list[Tensor], list[Tensor]]


@dataclass(frozen=True)
class TokenLoss:
    """Per-token loss before reduction, `[R]`, and what clipping did to each token (1.0 where it bit), `[R]`."""

    loss: Tensor
    clipped: Tensor


@dataclass(frozen=True)
class Objective:
    """`loss`: the contribution to the step's loss, a scalar with gradient. `metrics`: contributions, detached."""

    loss: Tensor
    metrics: StepMetrics


@dataclass(frozen=True)
class Estimator:
    """One `--advantage-estimator`.

    Attributes:
        advantages: from rewards, masks and KL.
        token_loss: from log-ratio, advantages and log-probs, all `[R]`.
        sequence_ratio: the ratio is that of the whole response, length-normalised, instead of each token's own.
        centers_rewards: the group's mean is taken off rewards before.
        scales_rewards: and they are divided by the group's standard deviation.
        needs_whitening: `--normalize-advantages` is not optional.
        needs_values: a critic's values enter the advantages.
    """

    name: str
    advantages: Callable[[Any, AdvantageInputs], Advantages]
    token_loss: Callable[[Any, Tensor, Tensor, Tensor], TokenLoss]
    sequence_ratio: bool = False
    centers_rewards: bool = False
    scales_rewards: bool = False
    needs_whitening: bool = False
    needs_values: bool = False


def broadcast_reward(args: Any, inputs: AdvantageInputs) -> Advantages:
    """The sample's reward at every response position."""
    advantages = [torch.full_like(m, float(r)) for r, m in zip(inputs.rewards, inputs.loss_masks, strict=True)]
    return advantages, list(advantages)


def discounted_suffix_sums(x: Tensor, gamma: float, chunk: int = 128) -> Tensor:
    """G_t = x_t + gamma G_{t+1} over `[n]`, in fp64, chunk by chunk from the end.

    Inside a chunk the sums are one product with the triangle gamma^(j-i), j >= i; chunks are linked by the carry.
    """
    out = x.double().clone()
    n = out.numel()
    steps = torch.arange(min(chunk, max(n, 1)), device=x.device)
    distance = (steps[None, :] - steps[:, None]).clamp(min=0)
    triangle = torch.triu(torch.full(distance.shape, float(gamma), dtype=torch.float64, device=x.device) ** distance)
    carry = out.new_zeros(())
    for start in range((n - 1) // chunk * chunk if n else 0, -1, -chunk):
        part = out[start : start + chunk]
        size = part.numel()
        if size == 0:
            break
        decay = float(gamma) ** torch.arange(size, 0, -1, dtype=torch.float64, device=x.device)
        sums = triangle[:size, :size] @ part + decay * carry
        out[start : start + size] = sums
        carry = sums[0]
    return out.to(x.dtype)
