"""A micro-batch as this rank's model input: packed or padded, cut into context-parallel shards."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.packed_seq_params import PackedSeqParams
from torch import Tensor

from miles.backends.megatron_utils.context_parallel import zig_zag_index
from miles.backends.megatron_utils.layout import Layout
from miles.backends.training_utils.backend import TrainData


@dataclass(frozen=True)
class ModelInput:
    """T: tokens of a packed row that this rank holds; B, S: padded rows, and this rank's part of their length.

    Attributes:
        input_ids, position_ids: int64 `[1, T]` (thd) or `[B, S]` (bshd).
        packed: borders of the whole row, for attention and rotary embeddings; None for bshd.
        rows: int64 `[r]`, which of this rank's tokens (flattened `[B, S]`) predict response tokens.
        targets: int64 `[r]`, those response tokens.
        held: int64 `[r]`, their places among all R response tokens of the micro-batch.
        num_responses: R.
    """

    input_ids: Tensor
    position_ids: Tensor
    packed: PackedSeqParams | None
    rows: Tensor
    targets: Tensor
    held: Tensor
    num_responses: int

    def to_all_responses(self, values: Tensor) -> Tensor:
        """`[r]` of each context-parallel rank as `[R]`; the gradient of each rank is that of its own part."""
        group = parallel_state.get_context_parallel_group()
        if group.size() == 1:
            return values
        return _Scatter.apply(values, self.held, self.num_responses, group)


def padded_tokens(columns: TrainData, indices: Sequence[int], layout: Layout, *, packed: bool) -> int:
    """Length of the row (thd), or of each row (bshd), that samples `indices` become, over all context-parallel ranks."""
    lengths = [int(columns["total_lengths"][i]) for i in indices]
    if not packed:
        return _up(max(lengths), layout.row_multiple)
    return _up(sum(_up(n, layout.sequence_multiple) for n in lengths), layout.row_multiple)


def build_input(
    columns: TrainData,
    indices: Sequence[int],
    layout: Layout,
    device: torch.device,
    *,
    packed: bool,
    length: int | None = None,
) -> ModelInput:
    """Lay out samples `indices`.

    Args:
        length: what the row (thd) or each row (bshd) is padded to; None for what `padded_tokens` says.
    """
    sequences = [torch.as_tensor(columns["tokens"][i], dtype=torch.int64) for i in indices]
    responses = [int(columns["response_lengths"][i]) for i in indices]
    length = length or padded_tokens(columns, indices, layout, packed=packed)
    if packed:
        widths = [_up(len(s), layout.sequence_multiple) for s in sequences]
        if rest := length - sum(widths):  # a last sequence of padding, which nobody attends to
            widths.append(rest)
    else:
        widths = [length] * len(sequences)
    starts = torch.tensor([0, *widths]).cumsum(0)
    ids = torch.zeros(int(starts[-1]), dtype=torch.int64)
    rows, targets = [], []
    for sequence, response, start in zip(sequences, responses, starts.tolist(), strict=False):
        end = start + len(sequence)
        ids[start:end] = sequence
        rows.append(torch.arange(end - 1 - response, end - 1))
        targets.append(sequence[len(sequence) - response :])
    positions = torch.cat([torch.arange(n) for n in widths])
    index = zig_zag_index(widths, layout.cp_rank, layout.cp_size)
    local_rows, held = _find(torch.cat(rows), index, len(ids))
    shape = (1, -1) if packed else (len(sequences), -1)
    return ModelInput(
        input_ids=ids[index].view(shape).to(device),
        position_ids=positions[index].view(shape).to(device),
        packed=_borders(starts, widths, device) if packed else None,
        rows=local_rows.to(device),
        targets=torch.cat(targets)[held].to(device),
        held=held.to(device),
        num_responses=sum(responses),
    )


def _up(n: int, multiple: int) -> int:
    return n + -n % multiple


def _find(rows: Tensor, index: Tensor, total: int) -> tuple[Tensor, Tensor]:
    """Which of `rows` lie among the positions `index`: their places in it, and their numbers in `rows`."""
    place = torch.full((total,), -1)
    place[index] = torch.arange(len(index))
    held = (place[rows] >= 0).nonzero()[:, 0]
    return place[rows[held]], held


def _borders(starts: Tensor, widths: list[int], device: torch.device) -> PackedSeqParams:
    borders = starts.to(torch.int32).to(device)
    longest = max(widths)
    return PackedSeqParams(
        qkv_format="thd",
        cu_seqlens_q=borders,
        cu_seqlens_kv=borders,
        cu_seqlens_q_padded=borders,
        cu_seqlens_kv_padded=borders,
        max_seqlen_q=longest,
        max_seqlen_kv=longest,
    )


class _Scatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: Tensor, held: Tensor, total: int, group: Any) -> Tensor:
        ctx.save_for_backward(held)
        out = values.new_zeros(total)
        out[held] = values
        dist.all_reduce(out, group=group)  # every place is held once: a gather
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        (held,) = ctx.saved_tensors
        return grads[0][held], None, None, None
