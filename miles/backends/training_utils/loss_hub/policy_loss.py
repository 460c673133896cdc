"""The clipped surrogate of PPO, per token, with asymmetric and dual clipping.

Sources: Schulman et al. 2017 (clip); Yu et al. 2025, DAPO (separate upper bound); Ye et al. 2020 (dual clip).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from miles.backends.training_utils.loss_hub.base import TokenLoss

# exp(20) is 5e8: a larger ratio would overflow without saying more.
MAX_LOG_RATIO = 20.0


def clip_range(args: Any) -> tuple[float, float]:
    """Ratio bounds (1 - eps_clip, 1 + eps_clip_high); `--eps-clip-high` defaults to `--eps-clip`."""
    high = getattr(args, "eps_clip_high", None)
    return 1.0 - args.eps_clip, 1.0 + (args.eps_clip if high is None else high)


def ratio_of(log_ratio: Tensor) -> Tensor:
    """exp of the log-ratio, which is clamped to 20 either way."""
    return log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()


def clipped_surrogate(args: Any, log_ratio: Tensor, advantages: Tensor, log_probs: Tensor) -> TokenLoss:
    """max(-r A, -clip(r) A); with `--eps-clip-c` c > 1 at most -c A where A < 0.

    Args:
        log_ratio: log p - log p_old, `[R]`, carries the gradient. advantages `[R]`. log_probs unused.
    """
    low, high = clip_range(args)
    ratio = ratio_of(log_ratio)
    plain = -ratio * advantages
    clipped = -ratio.clamp(low, high) * advantages
    loss = torch.maximum(plain, clipped)
    dual = getattr(args, "eps_clip_c", None)
    if dual is not None:
        if dual <= 1.0:
            raise ValueError(
                f"--eps-clip-c {dual} must be greater than 1: it bounds the loss where advantages are negative"
            )
        loss = torch.where(advantages < 0, torch.minimum(-dual * advantages, loss), loss)
    return TokenLoss(loss, (clipped > plain).float())
