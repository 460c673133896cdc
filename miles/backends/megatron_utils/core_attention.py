"""Attention for layer specs without Transformer Engine: packed rows, grouped queries, context parallelism.

Context-parallel ranks share each sequence in zig-zag order: of its `2 * cp` equal chunks, rank r holds chunks r and
`2 * cp - 1 - r`, so that every rank has equally much to attend to. Keys and values are gathered from all ranks, and
their gradients summed back. In a packed row every sequence is cut so on its own.
"""

from __future__ import annotations

import functools
import inspect
import itertools
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.module import MegatronModule
from torch import Tensor

from miles.backends.megatron_utils.context_parallel import gather_with_summed_gradient


class CoreAttention(MegatronModule):
    """Causal attention inside each sequence, for self-attention and for MLA (values narrower than keys)."""

    def __init__(
        self,
        config: Any,
        layer_number: int,
        attn_mask_type: Any = None,
        attention_type: str = "self",
        attention_dropout: float | None = None,
        softmax_scale: float | None = None,
        cp_comm_type: str | None = None,
        pg_collection: Any = None,
        **_: Any,
    ) -> None:
        """Arguments as megatron-core's attention passes them.

        Raises: ValueError for kinds of attention that only Transformer Engine has.
        """
        super().__init__(config=config)
        wanted = {"window_size": "a sliding window", "attention_sink": "attention sinks"}
        unknown = [what for name, what in wanted.items() if getattr(config, name, None) is not None]
        if getattr(config, "softmax_type", "vanilla") != "vanilla":
            unknown.append(f"softmax_type {config.softmax_type}")
        if unknown:
            raise ValueError(f"attention with {' and '.join(unknown)} needs Transformer Engine, which is not installed")
        self.group = pg_collection.cp if pg_collection is not None else parallel_state.get_context_parallel_group()
        self.scale = softmax_scale
        self.dropout = config.attention_dropout if attention_dropout is None else attention_dropout

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None = None,
        attn_mask_type: Any = None,
        attention_bias: Tensor | None = None,
        packed_seq_params: PackedSeqParams | None = None,
    ) -> Tensor:
        """Attend.

        Args:
            query, key, value: `[T, heads, dim]` of a packed row, or `[S, B, heads, dim]`, this rank's tokens. Padding
                on the right needs no mask: nothing before it sees it.
            packed_seq_params: borders of the whole row, over all context-parallel ranks.
        Returns: `[T, heads * dim]`, or `[S, B, heads * dim]`.
        """
        if packed_seq_params is not None and packed_seq_params.qkv_format == "thd":
            return self._row(query, key, value, packed_seq_params).flatten(1)
        length, batch = query.shape[:2]
        if self.group.size() == 1:
            heads_first = [x.permute(1, 2, 0, 3) for x in (query, key, value)]
            return self._attend(*heads_first, causal=True).permute(2, 0, 1, 3).reshape(length, batch, -1)
        rows = [x.transpose(0, 1).flatten(0, 1) for x in (query, key, value)]
        out = self._zig_zag(rows[0], rows[1], rows[2], [length] * batch)
        return out.view(batch, length, -1).transpose(0, 1).contiguous()

    def _row(self, query: Tensor, key: Tensor, value: Tensor, packed: PackedSeqParams) -> Tensor:
        borders = packed.cu_seqlens_q if packed.cu_seqlens_q_padded is None else packed.cu_seqlens_q_padded
        if self.group.size() == 1:
            if query.is_cuda and query.dtype in (torch.bfloat16, torch.float16) and not self._dropout():
                return _varlen(query, key, value, borders, int(packed.max_seqlen_q), self.scale)
            parts = [x.split(_lengths(borders)) for x in (query, key, value)]
            return torch.cat([self._sequence(q, k, v) for q, k, v in zip(*parts, strict=True)])
        local = [n // self.group.size() for n in _lengths(borders)]
        return self._zig_zag(query, key, value, local)

    def _zig_zag(self, query: Tensor, key: Tensor, value: Tensor, local: list[int]) -> Tensor:
        """`[t, heads, dim]` of this rank, whose share of each sequence has `local` tokens in two chunks."""
        size, rank = self.group.size(), self.group.rank()
        odd = [n for n in local if n % 2]
        if odd:
            raise ValueError(
                f"context parallelism over {size} ranks needs sequences of a multiple of {2 * size} tokens"
            )
        everywhere = [gather_with_summed_gradient(x, self.group) for x in (key, value)]
        outputs, start = [], 0
        for n in local:
            keys, values = (_in_order(x[:, start : start + n]) for x in everywhere)
            half = n // 2
            for chunk, begin in ((rank, start), (2 * size - 1 - rank, start + half)):
                end = (chunk + 1) * half
                outputs.append(self._sequence(query[begin : begin + half], keys[:end], values[:end]))
            start += n
        return torch.cat(outputs)

    def _sequence(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """The last `[q, heads, dim]` tokens of a sequence over all of it; `[q, heads, dim]`."""
        heads_first = [x.transpose(0, 1)[None] for x in (query, key, value)]
        out = self._attend(*heads_first, causal=query.shape[0] == key.shape[0])
        return out[0].transpose(0, 1)

    def _attend(self, query: Tensor, key: Tensor, value: Tensor, *, causal: bool) -> Tensor:
        mask = None
        if not causal:
            mask = torch.ones(query.shape[2], key.shape[2], dtype=torch.bool, device=query.device)
            mask = mask.tril(key.shape[2] - query.shape[2])
        grouped = query.shape[1] != key.shape[1]
        return F.scaled_dot_product_attention(
            query, key, value, mask, self._dropout(), is_causal=causal, scale=self.scale, enable_gqa=grouped
        )

    def _dropout(self) -> float:
        return self.dropout if self.training else 0.0


def _in_order(gathered: Tensor) -> Tensor:
    """One sequence of all ranks `[cp, n, ...]`, in zig-zag order, as `[cp * n, ...]` in its own order."""
    chunks = gathered.unflatten(1, (2, gathered.shape[1] // 2))
    return torch.cat([chunks[:, 0].flatten(0, 1), chunks[:, 1].flip(0).flatten(0, 1)])


def _lengths(borders: Tensor) -> list[int]:
    ends: list[int] = borders.tolist()
    return [b - a for a, b in itertools.pairwise(ends)]


def _varlen(query: Tensor, key: Tensor, value: Tensor, borders: Tensor, longest: int, scale: float | None) -> Tensor:
    """torch's variable-length flash attention: one kernel for the row."""
    width = value.shape[-1]
    if key.shape[-1] != width:  # MLA: the kernel wants one width
        value = F.pad(value, (0, key.shape[-1] - width))
    out = _varlen_kernel()(
        query, key, value, borders, borders, longest, longest, scale=scale, grouped=query.shape[1] != key.shape[1]
    )
    return out[..., :width]


@functools.cache
def _varlen_kernel() -> Any:
    from torch.nn.attention.varlen import varlen_attn

    says_grouped = "enable_gqa" in inspect.signature(varlen_attn).parameters
    says_window = "window_size" in inspect.signature(varlen_attn).parameters

    def call(*args: Any, scale: float | None, grouped: bool) -> Tensor:
        options: dict[str, Any] = {"window_size": (-1, 0)} if says_window else {"is_causal": True}
        if says_grouped:  # before torch 2.12 grouped heads need no word
            options["enable_gqa"] = grouped
        out = varlen_attn(*args, scale=scale, **options)
        assert isinstance(out, Tensor)  # a pair only where auxiliary outputs are asked for
        return out

    return call
