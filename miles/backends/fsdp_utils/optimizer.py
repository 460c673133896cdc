"""AdamW over sharded parameters, and gradient clipping that needs one collective."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor


def build_optimizer(args: Any, params: Sequence[nn.Parameter]) -> torch.optim.AdamW:
    """AdamW with the public flags; `LRSchedule` sets its learning rate and weight decay."""
    beta2 = getattr(args, "adam_beta2", None)
    return torch.optim.AdamW(
        list(params),
        lr=float(args.lr),
        betas=(float(getattr(args, "adam_beta1", 0.9)), 0.95 if beta2 is None else float(beta2)),
        eps=float(getattr(args, "adam_eps", 1e-8)),
        weight_decay=float(getattr(args, "weight_decay", None) or 0.0),
        fused=True,
    )


def clip_gradients(params: Sequence[nn.Parameter], max_norm: float, shard_group: dist.ProcessGroup) -> float:
    """Scale gradients to a global L2 norm of at most `max_norm` (0: leave them) and return the norm before. Collective.

    Args:
        shard_group: the ranks that hold different parts of each parameter; replicas are left out.
    """
    grads = [_local(p.grad) for p in params if p.grad is not None]
    squares = torch.zeros((), dtype=torch.float64, device=grads[0].device if grads else None)
    if grads:
        squares = torch.stack(torch._foreach_norm(grads)).double().square().sum()
    # Gathered and added in rank order, so that the norm is the same on every rank and in every run.
    parts = [torch.empty_like(squares) for _ in range(dist.get_world_size(shard_group))]
    dist.all_gather(parts, squares, group=shard_group)
    norm = float(torch.stack(parts).sum().sqrt())
    if max_norm > 0 and norm > max_norm:
        torch._foreach_mul_(grads, max_norm / (norm + 1e-6))
    return norm


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
