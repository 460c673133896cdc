"""Sharing sequences between context-parallel ranks: cutting a packed row into zig-zag shards, and collectives for them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


def zig_zag_index(lengths: Sequence[int], rank: int, size: int) -> Tensor:
    """Which positions of a packed row rank `rank` of `size` holds, in its order; int64 `[sum(lengths) / size]`.

    Args:
        lengths: of the sequences in the row, each a multiple of `2 * size`.
    Raises: ValueError for another length.
    """
    if size == 1:
        return torch.arange(sum(lengths))
    wrong = [n for n in lengths if n % (2 * size)]
    if wrong:
        raise ValueError(
            f"context parallelism over {size} ranks needs sequences of a multiple of {2 * size} tokens: {wrong}"
        )
    parts, start = [], 0
    for n in lengths:
        half = n // (2 * size)
        for chunk in (rank, 2 * size - 1 - rank):
            parts.append(torch.arange(start + chunk * half, start + (chunk + 1) * half))
        start += n
    return torch.cat(parts) if parts else torch.arange(0)


def gather_with_summed_gradient(x: Tensor, group: Any) -> Tensor:
    """`[n, ...]` of every rank as `[size, n, ...]`; each rank's gradient is the sum of what all ranks make of its part."""
    return _GatherSum.apply(x, group)


class _GatherSum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any) -> Tensor:
        ctx.group = group
        out = x.new_empty((group.size() * x.shape[0], *x.shape[1:]))
        dist.all_gather_into_tensor(out, x.contiguous(), group=group)
        return out.unflatten(0, (group.size(), x.shape[0]))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        grad = grads[0].flatten(0, 1).contiguous()
        own = grad.new_empty((grad.shape[0] // ctx.group.size(), *grad.shape[1:]))
        dist.reduce_scatter_tensor(own, grad, group=ctx.group)
        return own, None
