"""Log-probs and entropy where each tensor-parallel rank holds the logits of its own part of the vocabulary.

Three numbers a token travel between ranks, never logits; fp32 copies are made chunk by chunk. Exact: forward and
gradients equal those of the whole vocabulary to rounding.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from miles.backends.training_utils.logprobs import logit_gradient


@dataclass(frozen=True)
class VocabShard:
    """This rank's columns of the vocabulary: tokens `[start, start + size)`, of which those from `vocab` on are padding."""

    start: int
    size: int
    vocab: int
    group: Any = None  # the ranks that hold the others; None where one rank holds all

    @property
    def real(self) -> int:
        """Columns that are no padding."""
        return max(0, min(self.size, self.vocab - self.start))

    def reduce(self, tensor: Tensor, op: Any = dist.ReduceOp.SUM) -> Tensor:
        if self.group is not None and self.group.size() > 1:
            dist.all_reduce(tensor, op=op, group=self.group)
        return tensor


def vocab_parallel_log_probs(
    logits: Tensor,
    targets: Tensor,
    shard: VocabShard,
    *,
    temperature: float = 1.0,
    chunk: int,
    with_entropy: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """Log-prob of each target under softmax(logits / temperature) over the whole vocabulary. Collective in `shard.group`.

    Args:
        logits: `[rows, shard.size]` of any float dtype; their gradient is this rank's part too.
        targets: int64 `[rows]`, token ids, the same on every rank of the group.
        chunk: rows to hold in fp32 at a time; the same on every rank.
        with_entropy: also return the entropy of each row's distribution, differentiable.
    Returns: fp32 log-probs `[rows]`, natural log, and fp32 entropy `[rows]` in nats or None; the same on every rank.
    """
    log_probs, entropy = _VocabParallel.apply(logits, targets, shard, float(temperature), int(chunk), with_entropy)
    return log_probs, entropy if with_entropy else None


class _VocabParallel(torch.autograd.Function):
    @staticmethod
    def forward(ctx, logits, targets, shard, temperature, chunk, with_entropy):
        count = targets.shape[0]
        if logits.shape != (count, shard.size):
            raise ValueError(f"logits of shape {tuple(logits.shape)} for {count} targets and {shard.size} tokens")
        log_z = torch.empty(count, dtype=torch.float32, device=logits.device)
        log_probs, entropy = torch.empty_like(log_z), torch.empty_like(log_z) if with_entropy else log_z.new_empty(0)
        for start in range(0, count, chunk):
            part = slice(start, start + chunk)
            z = _tempered(logits[part], shard, temperature)
            highest = shard.reduce(z.amax(-1), dist.ReduceOp.MAX)
            here, column = _local(targets[part], shard)
            target = torch.where(here, z.gather(-1, column[:, None])[:, 0], 0.0)
            e = torch.exp(z - highest[:, None])
            sums = [e.sum(-1), target]
            if with_entropy:
                # where: an impossible token has e = 0 and logit -inf, and contributes 0.
                sums.append(torch.where(e > 0, e * z, 0.0).sum(-1))
            total, target, *weighted = shard.reduce(torch.stack(sums)).unbind()
            log_z[part] = highest + torch.log(total)
            log_probs[part] = target - log_z[part]
            if with_entropy:
                entropy[part] = log_z[part] - weighted[0] / total
        ctx.save_for_backward(logits, targets, log_z, entropy)
        ctx.shard, ctx.temperature, ctx.chunk = shard, temperature, chunk
        ctx.set_materialize_grads(False)
        return log_probs, entropy

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_log_probs, grad_entropy):
        logits, targets, log_z, entropy = ctx.saved_tensors
        if grad_log_probs is None:
            grad_log_probs = torch.zeros_like(log_z)
        # A row that the loss ignores must not turn 0 x inf into NaN.
        ignored = (grad_log_probs == 0) if grad_entropy is None else (grad_log_probs == 0) & (grad_entropy == 0)
        out = torch.empty_like(logits)
        for start in range(0, targets.shape[0], ctx.chunk):
            part = slice(start, start + ctx.chunk)
            log_p = _tempered(logits[part], ctx.shard, ctx.temperature).sub_(log_z[part, None])
            here, column = _local(targets[part], ctx.shard)
            at_target = torch.where(here, grad_log_probs[part], 0.0)
            of_entropy = None if grad_entropy is None else (grad_entropy[part], entropy[part])
            grad = logit_gradient(log_p, column, at_target, grad_log_probs[part], of_entropy)
            out[part] = grad.div_(ctx.temperature).masked_fill_(ignored[part, None], 0.0)
        return out, None, None, None, None, None


def _tempered(logits: Tensor, shard: VocabShard, temperature: float) -> Tensor:
    """A fp32 copy, with padding columns impossible."""
    z = torch.div(logits.float(), temperature) if temperature != 1.0 else logits.to(torch.float32, copy=True)
    if shard.real < shard.size:
        z[:, shard.real :] = float("-inf")
    return z


def _local(targets: Tensor, shard: VocabShard) -> tuple[Tensor, Tensor]:
    """Which targets are this rank's, and their columns (0 for others)."""
    column = targets - shard.start
    here = (column >= 0) & (column < shard.size)
    return here, torch.where(here, column, 0)
