"""Dr. GRPO's aggregation, for `--custom-pg-loss-reducer-function-path`: every token weighs the same, whatever its response.

GRPO divides by the length of the response, so that a long wrong answer costs less per token than a short one. Dr. GRPO
divides by a constant. Set `--disable-grpo-std-normalization` too: the paper also leaves out the group's deviation.
Source: Liu et al. 2025, "Understanding R1-Zero-Like Training".
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

# The paper takes the longest response that can be generated. Only its product with the learning rate counts (and its
# size against KL and entropy terms): a run that wants another number copies this function.
DENOMINATOR = 1000.0


def constant_denominator(
    total_lengths: Sequence[int],
    response_lengths: Sequence[int],
    loss_masks: Sequence[Tensor],
    calculate_per_token_loss: bool,
) -> Callable[[Tensor], Tensor]:
    """The reducer sum_i sum_t x m / 1000 of flat `[R]` values; the step divides by its rollouts afterwards.

    Raises: ValueError with `--calculate-per-token-loss`, which would divide by the tokens as well.
    """
    if calculate_per_token_loss:
        raise ValueError(
            "Dr. GRPO's reducer divides by a constant: drop --calculate-per-token-loss, which divides by tokens"
        )
    mask = torch.cat(list(loss_masks))

    def reduce(x: Tensor) -> Tensor:
        return (torch.where(mask > 0, x, 0.0) * mask).sum() / DENOMINATOR

    return reduce
