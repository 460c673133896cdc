"""Attention over packed rows: several sequences in one row `[1, heads, tokens, head_dim]`, none sees another.

Registered with transformers as `PACKED` (fused kernels) and `PACKED_EAGER` (written out); the model passes `packed_layout`
down to it as a keyword argument. Each segment is its own SDPA call on the CPU: measured against padding and a
block-diagonal mask this is the fastest from 80 tokens on, and a sequence's result does not depend on its neighbours.
A segment that continues a shared prompt attends to the prompt's keys, then to its own.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from miles.backends.fsdp_utils.layout import PackedLayout

PACKED, PACKED_EAGER = "miles_packed", "miles_packed_eager"
# Layer types that see nothing across the borders that position ids mark.
_PACKABLE_LAYERS = {"full_attention", "sliding_attention"}


def register_packed_attention() -> None:
    from transformers import AttentionInterface

    AttentionInterface.register(PACKED, packed_attention)
    AttentionInterface.register(PACKED_EAGER, functools.partial(packed_attention, fused=False))


@dataclass(frozen=True)
class AttentionChoice:
    """Which kernel a model gets, whether its rows are packed, and how sequence borders reach the kernel."""

    implementation: str  # transformers' name
    packed: bool
    borders: str  # packed | flash | none
    reason: str | None = None  # why it is not what was asked for


def choose_attention(model: Any, wanted: str, *, pack: bool) -> AttentionChoice:
    """The kernel `wanted` (sdpa, eager, flash_attention_2, ...) with packed rows, or the nearest that is right for `model`."""
    kept_apart = _why_not_packed(model) if pack else None
    if pack and kept_apart is None:
        if wanted.startswith("flash_attention"):
            return AttentionChoice(wanted, True, "flash")
        return AttentionChoice(PACKED_EAGER if wanted == "eager" else PACKED, True, "packed")
    unfused = _needs_eager(model) if wanted == "sdpa" else None
    return AttentionChoice("eager" if unfused else wanted, False, "none", unfused or kept_apart)


def _needs_eager(model: Any) -> str | None:
    """What torch's fused kernel would leave out of this model's attention."""
    name = type(model).__name__
    if getattr(model.config, "attn_logit_softcapping", None):
        return f"{name} caps its attention logits"
    if any(parameter.endswith(".sinks") for parameter, _ in model.named_parameters()):
        return f"{name} has attention sinks"
    return None if getattr(model, "_supports_sdpa", False) else f"{name} has no fused attention"


def _why_not_packed(model: Any) -> str | None:
    """Why sequences in one row would leak into each other; None when they do not."""
    if not getattr(model, "_supports_attention_backend", False):
        return f"{type(model).__name__} mixes tokens outside of pluggable attention functions"
    unknown = set(getattr(model.config, "layer_types", None) or []) - _PACKABLE_LAYERS
    return f"{type(model).__name__} has layers of type {', '.join(sorted(unknown))}" if unknown else None


def packed_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    packed_layout: PackedLayout | None = None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    fused: bool = True,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Causal attention inside each packed sequence.

    Args:
        query: `[1, heads, tokens, head_dim]`; key and value may have fewer heads (grouped queries).
        packed_layout: the segments of the row; their lengths sum to `tokens`.
        sliding_window: how many tokens back, itself included, a token sees; None for all.
        softcap: logits x become `softcap * tanh(x / softcap)`.
        s_aux: attention sinks `[heads]`: logits that take part in the softmax and attend to nothing.
        fused: whether torch's fused kernels may be used.
    Returns:
        `[1, tokens, heads, head_dim]`, and None for the weights.
    """
    if packed_layout is None or query.shape[0] != 1:
        raise ValueError(f"{type(module).__name__} called packed attention without packed_layout or on a batch of rows")
    fused = fused and softcap is None and s_aux is None
    if fused and query.is_cuda and query.dtype in (torch.bfloat16, torch.float16) and not dropout:
        return _flash_varlen(query, key, value, packed_layout, scaling, sliding_window), None
    outputs = []
    for q, k, v in _segments(query, key, value, packed_layout):
        mask = _band(q.shape[2], k.shape[2], sliding_window, q.device)
        if fused:
            grouped = q.shape[1] != k.shape[1]
            options: dict[str, Any] = {"dropout_p": dropout, "scale": scaling, "enable_gqa": grouped}
            out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None, **options)
        else:
            out = _written_out(q, k, v, mask, scaling, dropout, softcap, s_aux)
        outputs.append(out)
    return torch.cat(outputs, dim=2).transpose(1, 2).contiguous(), None


def _segments(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, layout: PackedLayout
) -> Iterator[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    """Queries, keys and values of each segment, its prefix's keys and values first."""
    queries, keys, values = (x.split(layout.lengths, dim=2) for x in (query, key, value))
    for i, prefix in enumerate(layout.prefixes):
        if prefix is None:
            yield queries[i], keys[i], values[i]
        else:
            yield (
                queries[i],
                torch.cat([keys[prefix], keys[i]], dim=2),
                torch.cat([values[prefix], values[i]], dim=2),
            )


def _written_out(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    scaling: float | None,
    dropout: float,
    softcap: float | None,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """Softmax attention of one segment, `[1, heads, tokens, head_dim]`, with everything the fused kernels lack."""
    _, heads, queries, dim = query.shape
    n = key.shape[2]
    repeat = heads // key.shape[1]
    key, value = key.repeat_interleave(repeat, 1), value.repeat_interleave(repeat, 1)
    logits = query @ key.transpose(-1, -2) * (dim**-0.5 if scaling is None else scaling)
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    seen = torch.ones(n, n, dtype=torch.bool, device=query.device).tril() if mask is None else mask
    logits = logits.masked_fill(~seen, torch.finfo(logits.dtype).min)
    if sinks is not None:
        logits = torch.cat([logits, sinks.to(logits.dtype).view(1, heads, 1, 1).expand(1, heads, queries, 1)], dim=-1)
    weights = torch.softmax(logits.float(), dim=-1)[..., :n].to(query.dtype)
    return F.dropout(weights, dropout) @ value


def _band(queries: int, keys: int, window: int | None, device: torch.device) -> torch.Tensor | None:
    """What the last `queries` of `keys` positions see, `[queries, keys]`; None for plain causal attention."""
    before = keys - queries
    if before == 0 and (window is None or keys <= window):
        return None
    seen = torch.ones(queries, keys, dtype=torch.bool, device=device).tril(before)
    return seen if window is None else seen.triu(before + 1 - window)


def _flash_varlen(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    layout: PackedLayout,
    scaling: float | None,
    window: int | None,
) -> torch.Tensor:
    """torch's own variable-length flash attention: one kernel for the row."""
    from torch.nn.attention.varlen import varlen_attn

    if layout.shares:
        raise ValueError("a row with shared prompts reached the variable-length kernel, which knows none")
    lengths = layout.lengths
    ends = torch.tensor([0, *lengths], device=query.device).cumsum(0).to(torch.int32)
    q, k, v = (x[0].transpose(0, 1).contiguous() for x in (query, key, value))
    options: dict[str, Any] = {"scale": scaling, "window_size": (-1 if window is None else window - 1, 0)}
    if "enable_gqa" in inspect.signature(varlen_attn).parameters:  # before torch 2.12 grouped heads need no word
        options["enable_gqa"] = q.shape[1] != k.shape[1]
    out = varlen_attn(q, k, v, ends, ends, max(lengths), max(lengths), **options)
    assert isinstance(out, torch.Tensor)  # a pair only where auxiliary outputs are asked for
    return out.unsqueeze(0)
