"""Attention over packed rows: several sequences in one row `[1, heads, tokens, head_dim]`, none sees another.

Registered with transformers as `PACKED` (fused kernels) and `PACKED_EAGER` (written out); the model passes `packed_lengths`
down to it as a keyword argument. Each sequence is its own SDPA call on the CPU: measured against padding and a
block-diagonal mask this is the fastest from 80 tokens on, and a sequence's result does not depend on its neighbours.
"""

from __future__ import annotations

import functools
import inspect
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

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
    packed_lengths: list[int] | None = None,
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
        packed_lengths: tokens of each sequence, in order; they sum to `tokens`.
        sliding_window: how many tokens back, itself included, a token sees; None for all.
        softcap: logits x become `softcap * tanh(x / softcap)`.
        s_aux: attention sinks `[heads]`: logits that take part in the softmax and attend to nothing.
        fused: whether torch's fused kernels may be used.
    Returns:
        `[1, tokens, heads, head_dim]`, and None for the weights.
    """
    if packed_lengths is None or query.shape[0] != 1:
        raise ValueError(
            f"{type(module).__name__} called packed attention without packed_lengths or on a batch of rows"
        )
    fused = fused and softcap is None and s_aux is None
    if fused and query.is_cuda and query.dtype in (torch.bfloat16, torch.float16) and not dropout:
        return _flash_varlen(query, key, value, packed_lengths, scaling, sliding_window), None
    outputs = []
    for q, k, v in zip(*(x.split(packed_lengths, dim=2) for x in (query, key, value)), strict=True):
        mask = _band(q.shape[2], sliding_window, q.device)
        if fused:
            grouped = q.shape[1] != k.shape[1]
            options: dict[str, Any] = {"dropout_p": dropout, "scale": scaling, "enable_gqa": grouped}
            out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None, **options)
        else:
            out = _written_out(q, k, v, mask, scaling, dropout, softcap, s_aux)
        outputs.append(out)
    return torch.cat(outputs, dim=2).transpose(1, 2).contiguous(), None


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
    """Softmax attention of one sequence, `[1, heads, tokens, head_dim]`, with everything the fused kernels lack."""
    _, heads, n, dim = query.shape
    repeat = heads // key.shape[1]
    key, value = key.repeat_interleave(repeat, 1), value.repeat_interleave(repeat, 1)
    logits = query @ key.transpose(-1, -2) * (dim**-0.5 if scaling is None else scaling)
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    seen = torch.ones(n, n, dtype=torch.bool, device=query.device).tril() if mask is None else mask
    logits = logits.masked_fill(~seen, torch.finfo(logits.dtype).min)
    if sinks is not None:
        logits = torch.cat([logits, sinks.to(logits.dtype).view(1, heads, 1, 1).expand(1, heads, n, 1)], dim=-1)
    weights = torch.softmax(logits.float(), dim=-1)[..., :n].to(query.dtype)
    return F.dropout(weights, dropout) @ value


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
