"""Run in the ranks of a world: the core attention against attention written out."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist

LENGTHS = (8, 4, 12)
HEADS, GROUPS, DIM, VALUE_DIM = 4, 2, 8, 6


def attention(cp: Any) -> Any:
    from miles.backends.megatron_utils.platform import choose_platform

    choose_platform("cpu")
    from miles.backends.megatron_utils.core_attention import CoreAttention

    config = SimpleNamespace(attention_dropout=0.0, softmax_type="vanilla", window_size=None)
    return CoreAttention(config, 1, pg_collection=SimpleNamespace(cp=cp))


def inputs(*, mla: bool) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    total, keys = sum(LENGTHS), HEADS if mla else GROUPS
    shapes = [(total, HEADS, DIM), (total, keys, DIM), (total, keys, VALUE_DIM if mla else DIM), (total, HEADS)]
    return [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]


def written_out(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Softmax attention of every sequence by itself, `[T, heads, dim]`."""
    repeat = q.shape[1] // k.shape[1]
    outputs = []
    for a, b, c in zip(*(x.split(LENGTHS) for x in (q, k, v)), strict=True):
        b, c = b.repeat_interleave(repeat, 1), c.repeat_interleave(repeat, 1)
        scores = torch.einsum("qhd,khd->hqk", a, b) / a.shape[-1] ** 0.5
        scores = scores.masked_fill(torch.ones(len(a), len(a)).triu(1).bool(), float("-inf"))
        outputs.append(torch.einsum("hqk,khd->qhd", scores.softmax(-1), c))
    return torch.cat(outputs)


def largest_differences(mla: bool) -> list[float]:
    """Of this rank's outputs and of its three input gradients, packed row over all ranks of the world."""
    from megatron.core.packed_seq_params import PackedSeqParams

    from miles.backends.megatron_utils.context_parallel import zig_zag_index

    group = dist.group.WORLD
    assert group is not None
    module = attention(group)
    index = zig_zag_index(LENGTHS, group.rank(), group.size())
    *whole, weight = inputs(mla=mla)
    whole = [x.requires_grad_() for x in whole]
    expected = written_out(*whole)
    (expected * weight[..., None]).sum().backward()
    local = [x.detach()[index].requires_grad_() for x in whole]
    borders = torch.tensor([0, *LENGTHS]).cumsum(0).to(torch.int32)
    row = PackedSeqParams("thd", borders, borders, max_seqlen_q=max(LENGTHS), max_seqlen_kv=max(LENGTHS))
    out = module(*local, packed_seq_params=row).view(len(index), HEADS, -1)
    (out * weight[index][..., None]).sum().backward()
    pairs = [(out, expected[index])] + [(x.grad, y.grad[index]) for x, y in zip(local, whole, strict=True)]
    return [float((a - b).abs().max()) for a, b in pairs]


def padded_differs_by() -> float:
    """`[S, B, heads, dim]` over the ranks of the world, against the same sequence in a packed row."""
    from miles.backends.megatron_utils.context_parallel import zig_zag_index

    group = dist.group.WORLD
    assert group is not None
    module = attention(group)
    *whole, _ = inputs(mla=False)
    expected = written_out(*whole)[: LENGTHS[0]]
    index = zig_zag_index([LENGTHS[0]], group.rank(), group.size())
    batch = [torch.stack([x[: LENGTHS[0]][index], torch.zeros_like(x[: LENGTHS[0]][index])], 1) for x in whole]
    out = module(*batch).view(len(index), 2, HEADS, -1)
    return float((out[:, 0] - expected[index]).abs().max())
