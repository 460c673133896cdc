"""Attention over packed rows: several sequences in one row `[1, heads, tokens, head_dim]`, none sees another.

Registered with transformers under `PACKED`; the model passes `packed_lengths` down to it as a keyword argument.
Each sequence is its own SDPA call on the CPU: measured against padding and a block-diagonal mask this is the fastest from
80 tokens on, and a sequence's result does not depend on what it is packed with.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
import torch.nn.functional as F

PACKED = "miles_packed"
# Layer types whose mask this function can rebuild from its arguments.
_KNOWN_LAYER_TYPES = {"full_attention", "sliding_attention"}


def register_packed_attention() -> None:
    from transformers import AttentionInterface

    AttentionInterface.register(PACKED, packed_attention)


def why_not_packed(model_class: type, config: Any) -> str | None:
    """Why rows of this architecture cannot be packed with `packed_attention`; None when they can."""
    if not getattr(model_class, "_supports_attention_backend", False):
        return f"{model_class.__name__} does not call pluggable attention functions"
    unknown = set(getattr(config, "layer_types", None) or []) - _KNOWN_LAYER_TYPES
    if unknown:
        return f"{model_class.__name__} has layers of type {', '.join(sorted(unknown))}"
    for field in ("attn_logit_softcapping", "attention_chunk_size"):
        if getattr(config, field, None):
            return f"{model_class.__name__} uses {field}"
    return None


def packed_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    packed_lengths: list[int] | None = None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Causal attention inside each packed sequence.

    Args:
        query: `[1, heads, tokens, head_dim]`; key and value may have fewer heads (grouped queries).
        packed_lengths: tokens of each sequence, in order; they sum to `tokens`.
        sliding_window: how many tokens back, itself included, a token sees; None for all.
    Returns:
        `[1, tokens, heads, head_dim]`, and None for the weights.
    """
    if packed_lengths is None or query.shape[0] != 1:
        raise ValueError(
            f"{type(module).__name__} called packed attention without packed_lengths or on a batch of rows"
        )
    if kwargs.get("s_aux") is not None:
        raise ValueError(f"{type(module).__name__} uses attention sinks, which packed rows do not support")
    if query.is_cuda and query.dtype in (torch.bfloat16, torch.float16) and not dropout:
        return _flash_varlen(query, key, value, packed_lengths, scaling, sliding_window), None
    outputs = []
    for q, k, v in zip(*(x.split(packed_lengths, dim=2) for x in (query, key, value)), strict=True):
        mask = _band(q.shape[2], sliding_window, q.device)
        out = F.scaled_dot_product_attention(
            q,
            k,
            v,
            attn_mask=mask,
            dropout_p=dropout,
            scale=scaling,
            is_causal=mask is None,
            enable_gqa=q.shape[1] != k.shape[1],
        )
        outputs.append(out)
    return torch.cat(outputs, dim=2).transpose(1, 2).contiguous(), None


def _band(length: int, window: int | None, device: torch.device) -> torch.Tensor | None:
    """The causal mask `[length, length]` of a sliding window; None where the window covers the whole sequence."""
    if window is None or length <= window:
        return None
    ones = torch.ones(length, length, dtype=torch.bool, device=device)
    return ones.tril() & ones.triu(1 - window)


def _flash_varlen(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    lengths: list[int],
    scaling: float | None,
    window: int | None,
) -> torch.Tensor:
    """torch's own variable-length flash attention: one kernel for the row."""
    from torch.nn.attention.varlen import varlen_attn

    ends = torch.tensor([0, *lengths], device=query.device).cumsum(0).to(torch.int32)
    q, k, v = (x[0].transpose(0, 1).contiguous() for x in (query, key, value))
    options: dict[str, Any] = {"scale": scaling, "window_size": (-1 if window is None else window - 1, 0)}
    if "enable_gqa" in inspect.signature(varlen_attn).parameters:  # before torch 2.12 grouped heads need no word
        options["enable_gqa"] = q.shape[1] != k.shape[1]
    out = varlen_attn(q, k, v, ends, ends, max(lengths), max(lengths), **options)
    assert isinstance(out, torch.Tensor)  # a pair only where auxiliary outputs are asked for
    return out.unsqueeze(0)
