"""Lay a micro-batch out for the model: one packed row (thd), or padded rows (bshd).

Both give the same `PackedBatch`: model inputs, and for each response token the row of the flattened hidden states
that predicts it. The token at position p is predicted by the row at p - 1 of its own sequence, so no label ever
crosses a border; attention must be kept inside `cu_seqlens` (thd) or `attention_mask` (bshd).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class PackedBatch:
    """A micro-batch as model input. T: row tokens, B: samples, S: padded length, R: all response tokens.

    Attributes:
        input_ids, position_ids: int64 `[1, T]` (thd) or `[B, S]` (bshd); positions restart at each sequence.
        attention_mask: int64 `[B, S]`, 1 at real tokens (bshd); None for thd.
        cu_seqlens: int32 borders of the sequences of the packed row, `[B + 1]`, or `[B + 2]` with padding, which forms
            a last sequence of its own; None for bshd.
        rows: int64 `[R]`, index into hidden states flattened over the first two dimensions.
        targets: int64 `[R]`, the response tokens themselves.
        response_lengths: tokens of each response, in order; they sum to R.
    """

    input_ids: Tensor
    position_ids: Tensor
    attention_mask: Tensor | None
    cu_seqlens: Tensor | None
    max_seqlen: int
    rows: Tensor
    targets: Tensor
    response_lengths: list[int]
    num_tokens: int  # real ones, padding excluded

    def split(self, flat: Tensor) -> list[Tensor]:
        """Cut a flat response tensor `[R]` into one tensor a sample."""
        return list(torch.split(flat, self.response_lengths))

    def to(self, device: torch.device | str) -> PackedBatch:
        """A copy whose tensors lie on `device`."""
        moved: dict[str, Any] = {k: v.to(device) for k, v in vars(self).items() if isinstance(v, Tensor)}
        return replace(self, **moved)


def pack_micro_batch(
    tokens: Sequence[Any], response_lengths: Sequence[int], *, pad_multiple: int = 1, pad_token_id: int = 0
) -> PackedBatch:
    """Pack sequences into one row (thd).

    Args:
        tokens: one int sequence a sample, prompt then response.
        response_lengths: how many of its last tokens are the response.
        pad_multiple: the row is padded to a multiple of this, with a sequence of `pad_token_id` that nobody attends to.
    Raises: ValueError where a response leaves no token to predict its first one from.
    """
    sequences = _as_sequences(tokens, response_lengths)
    lengths = [len(s) for s in sequences]
    total = sum(lengths)
    padding = -total % pad_multiple
    if padding:
        sequences = [*sequences, torch.full((padding,), pad_token_id, dtype=torch.int64)]
        lengths = [*lengths, padding]
    borders = torch.zeros(len(lengths) + 1, dtype=torch.int32)
    borders[1:] = torch.tensor(lengths, dtype=torch.int32).cumsum(0)
    starts = borders[:-1].tolist()
    rows, targets = _response_rows(sequences, response_lengths, starts)
    return PackedBatch(
        input_ids=torch.cat(sequences)[None],
        position_ids=torch.cat([torch.arange(n) for n in lengths])[None],
        attention_mask=None,
        cu_seqlens=borders,
        max_seqlen=max(lengths),
        rows=rows,
        targets=targets,
        response_lengths=[int(n) for n in response_lengths],
        num_tokens=total,
    )


def pad_micro_batch(
    tokens: Sequence[Any], response_lengths: Sequence[int], *, pad_multiple: int = 1, pad_token_id: int = 0
) -> PackedBatch:
    """Pad sequences on the right to one length, a multiple of `pad_multiple` (bshd). Arguments as `pack_micro_batch`."""
    sequences = _as_sequences(tokens, response_lengths)
    lengths = [len(s) for s in sequences]
    width = max(lengths)
    width += -width % pad_multiple
    ids = torch.full((len(sequences), width), pad_token_id, dtype=torch.int64)
    attention = torch.zeros((len(sequences), width), dtype=torch.int64)
    for row, sequence in enumerate(sequences):
        ids[row, : len(sequence)] = sequence
        attention[row, : len(sequence)] = 1
    rows, targets = _response_rows(sequences, response_lengths, [row * width for row in range(len(sequences))])
    return PackedBatch(
        input_ids=ids,
        position_ids=torch.arange(width).expand(len(sequences), width).contiguous(),
        attention_mask=attention,
        cu_seqlens=None,
        max_seqlen=width,
        rows=rows,
        targets=targets,
        response_lengths=[int(n) for n in response_lengths],
        num_tokens=sum(lengths),
    )


def layout_micro_batch(
    args: Any, tokens: Sequence[Any], response_lengths: Sequence[int], pad_multiple: int = 1
) -> PackedBatch:
    """The layout that `--qkv-format` names."""
    layout = {"thd": pack_micro_batch, "bshd": pad_micro_batch}[getattr(args, "qkv_format", "thd")]
    return layout(tokens, response_lengths, pad_multiple=pad_multiple)


def _as_sequences(tokens: Sequence[Any], response_lengths: Sequence[int]) -> list[Tensor]:
    sequences = [torch.as_tensor(t, dtype=torch.int64).reshape(-1) for t in tokens]
    wrong = [
        f"sample {i}: {n} response tokens of {len(s)}"
        for i, (s, n) in enumerate(zip(sequences, response_lengths, strict=True))
        if not 0 <= n < max(len(s), 1)
    ]
    if wrong:
        raise ValueError("a response must follow at least one prompt token; " + "; ".join(wrong))
    return sequences


def _response_rows(
    sequences: Sequence[Tensor], response_lengths: Sequence[int], starts: Sequence[int]
) -> tuple[Tensor, Tensor]:
    rows, targets = [], []
    for sequence, response, start in zip(sequences, response_lengths, starts, strict=False):
        end = start + len(sequence) - 1
        rows.append(torch.arange(end - response, end))
        targets.append(sequence[len(sequence) - response :])
    return torch.cat(rows), torch.cat(targets)
