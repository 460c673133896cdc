"""Log-probs and entropy of sampled tokens, in chunks: a full fp32 `[tokens, vocab]` is never held.

`linear_log_probs` starts from hidden states and the output projection, so that not even the logits exist as a whole;
`log_probs_from_logits` serves models and losses that have them already. Both are exact: forward and gradients equal
the unchunked formula to rounding. The backward pass recomputes a chunk's logits, unless all rows fit in one chunk.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

# Elements of fp32 logits that one chunk may hold when --log-probs-chunk-size leaves the choice to us: 256 MiB.
_CHUNK_ELEMENTS = 1 << 26


def loss_temperature(args: Any) -> float:
    """What logits are divided by: the sampling temperature for RL losses, and 1 for supervised ones.

    A greedy run (temperature 0) has no tempered distribution, and is scored at 1.
    """
    if getattr(args, "loss_type", "policy_loss") == "sft_loss":
        return 1.0
    temperature = float(getattr(args, "rollout_temperature", 1.0))
    return temperature if temperature > 0 else 1.0


def chunk_rows(args: Any, vocab: int) -> int:
    """Rows a chunk holds: `--log-probs-chunk-size` when positive, else as many as keep it under 256 MiB."""
    wanted = int(getattr(args, "log_probs_chunk_size", -1))
    return wanted if wanted > 0 else max(1, _CHUNK_ELEMENTS // vocab)


def linear_log_probs(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    bias: Tensor | None = None,
    temperature: float = 1.0,
    chunk: int | None = None,
    with_entropy: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """Log-prob of each target under softmax((hidden @ weight.T + bias) / temperature), differentiable.

    Args:
        hidden: `[rows, hidden]`, only rows that predict something: select response rows before.
        weight: output projection `[vocab, hidden]`, bias `[vocab]`, in the dtype of `hidden`.
        targets: int64 `[rows]`.
        chunk: rows to hold logits for at a time; None: as many as keep a chunk under 256 MiB.
        with_entropy: also return the entropy of each row's distribution, differentiable.
    Returns: fp32 log-probs `[rows]`, natural log, and fp32 entropy `[rows]` in nats or None.
    """
    rows = chunk or max(1, _CHUNK_ELEMENTS // weight.shape[0])
    logp, entropy = _ChunkedLogProbs.apply(hidden, weight, bias, targets, float(temperature), int(rows), with_entropy)
    return logp, entropy if with_entropy else None


def log_probs_from_logits(
    logits: Tensor,
    targets: Tensor,
    *,
    temperature: float = 1.0,
    chunk: int | None = None,
    with_entropy: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """As `linear_log_probs`, from logits `[rows, vocab]` of any float dtype; fp32 copies are made chunk by chunk."""
    rows = chunk or max(1, _CHUNK_ELEMENTS // logits.shape[-1])
    logp, entropy = _ChunkedLogProbs.apply(logits, None, None, targets, float(temperature), int(rows), with_entropy)
    return logp, entropy if with_entropy else None


class _ChunkedLogProbs(torch.autograd.Function):
    """With weight None, `hidden` is the logits themselves."""

    @staticmethod
    def forward(ctx, hidden, weight, bias, targets, temperature, chunk, with_entropy):
        count = targets.shape[0]
        if hidden.shape[0] != count:
            raise ValueError(f"{hidden.shape[0]} rows of hidden states for {count} targets")
        log_probs = torch.empty(count, dtype=torch.float32, device=hidden.device)
        log_z = torch.empty_like(log_probs)
        entropy = torch.empty_like(log_probs) if with_entropy else log_probs.new_empty(0)
        kept = None
        for start in range(0, count, chunk):
            part = slice(start, start + chunk)
            logits = _chunk_logits(hidden[part], weight, bias, temperature)
            log_z[part] = torch.logsumexp(logits, dim=-1)
            log_probs[part] = logits.gather(-1, targets[part, None])[:, 0] - log_z[part]
            if with_entropy:
                p = torch.softmax(logits, dim=-1)
                # where: an impossible token has p = 0 and logit -inf, and contributes 0.
                entropy[part] = log_z[part] - torch.where(p > 0, p * logits, 0.0).sum(-1)
            if count <= chunk:
                kept = logits
        ctx.save_for_backward(hidden, weight, bias, targets, log_z, entropy, kept)
        ctx.temperature, ctx.chunk = temperature, chunk
        ctx.set_materialize_grads(False)
        return log_probs, entropy

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_log_probs, grad_entropy):
        hidden, weight, bias, targets, log_z, entropy, kept = ctx.saved_tensors
        if grad_log_probs is None:
            grad_log_probs = torch.zeros_like(log_z)
        # A row that the loss ignores must not turn 0 x inf into NaN.
        broken = ~torch.isfinite(log_z) & (grad_log_probs == 0)
        if grad_entropy is not None:
            broken &= grad_entropy == 0
        any_broken = bool(broken.any())
        wanted = [x if need else None for x, need in zip((hidden, weight, bias), ctx.needs_input_grad, strict=False)]
        to_hidden = None if wanted[0] is None else torch.zeros_like(hidden)
        # Accumulated in fp32 over chunks, whatever the weight's dtype.
        to_weight, to_bias = (None if x is None else torch.zeros_like(x, dtype=torch.float32) for x in wanted[1:])
        for start in range(0, targets.shape[0], ctx.chunk):
            part = slice(start, start + ctx.chunk)
            rows = hidden[part]
            logits = kept if kept is not None else _chunk_logits(rows, weight, bias, ctx.temperature)
            of_entropy = None if grad_entropy is None else (grad_entropy[part], entropy[part])
            grad_rows = grad_log_probs[part]
            grad = logit_gradient(logits - log_z[part, None], targets[part], grad_rows, grad_rows, of_entropy)
            grad = grad.div_(ctx.temperature).to(hidden.dtype)
            if any_broken:
                grad, rows = (x.masked_fill(broken[part, None], 0.0) for x in (grad, rows))
            if to_hidden is not None:
                to_hidden[part] = grad if weight is None else grad @ weight
            if to_weight is not None:
                if rows.dtype == to_weight.dtype:
                    to_weight.addmm_(grad.T, rows)
                else:
                    to_weight += grad.T @ rows
            if to_bias is not None:
                to_bias += grad.sum(0, dtype=torch.float32)
        to_weight = None if to_weight is None else to_weight.to(weight.dtype)
        to_bias = None if to_bias is None else to_bias.to(bias.dtype)
        return to_hidden, to_weight, to_bias, None, None, None, None


def _chunk_logits(hidden: Tensor, weight: Tensor | None, bias: Tensor | None, temperature: float) -> Tensor:
    logits = hidden if weight is None else torch.nn.functional.linear(hidden, weight, bias)
    logits = logits.float()
    return logits / temperature if temperature != 1.0 else logits


def logit_gradient(
    log_p: Tensor, column: Tensor, at_target: Tensor, grad: Tensor, of_entropy: tuple[Tensor, Tensor] | None
) -> Tensor:
    """d(log p_target)/dz = 1[target] - p, and dH/dz = -p (log p + H), each weighted by its row's gradient.

    Args:
        log_p: fp32 `[rows, columns]`, all of the vocabulary or a part; may be overwritten.
        column: int64 `[rows]`, the target's place in it; at_target `[rows]`: `grad`, and 0 where the target is in another part.
        grad: `[rows]`, of the target's log-prob; of_entropy: the entropy's gradient and the entropy, `[rows]` each.
    """
    if of_entropy is None:
        out = log_p.exp_().mul_(-grad[:, None])
    else:
        grad_entropy, entropy = of_entropy
        p = log_p.exp()
        # where: an impossible token has p = 0 and log p = -inf, and contributes 0.
        terms = torch.where(p > 0, p * (log_p + entropy[:, None]), 0.0)
        out = p.mul_(-grad[:, None]).addcmul_(terms, -grad_entropy[:, None])
    return out.scatter_add_(-1, column[:, None], at_target[:, None])
