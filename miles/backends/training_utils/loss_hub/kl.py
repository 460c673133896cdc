"""Per-token KL estimators; d = log p - log base, in fp32.

Sources: J. Schulman, "Approximating KL divergence" (k1, k2, k3); DeepSeek-AI 2025, DeepSeek-V3.2 (the unbiased variant: k3
is an estimate under its own policy, and tokens of an older one are weighted by the ratio).
"""

from __future__ import annotations

import torch
from torch import Tensor

# exp(20) is 5e8: beyond it an estimate says "far", and must stay finite in forward and backward.
_MAX_LOG_RATIO = 20.0
_MAX_LOW_VAR_KL = 10.0

KL_TYPES = ("k1", "k2", "k3", "low_var_kl")


def compute_approx_kl(
    log_probs: Tensor, log_probs_base: Tensor, kl_loss_type: str, importance_ratio: Tensor | None = None
) -> Tensor:
    """Estimate KL(p || base) at each sampled token.

    Args:
        log_probs, log_probs_base: `[tokens]`, of the sampled tokens, natural log.
        kl_loss_type: `k1`: d; `k2`: d^2 / 2; `k3`: exp(-d) - 1 + d, with d clamped to 20 either way so that neither the
            value nor its gradient overflows; `low_var_kl`: k3 with NaN taken as 0 and the result clamped to 10.
        importance_ratio: multiplies the estimate, before the last clamp (`--use-unbiased-kl`).
    """
    if kl_loss_type not in KL_TYPES:
        raise ValueError(f"--kl-loss-type {kl_loss_type!r} is not one of {', '.join(KL_TYPES)}")
    d = log_probs.float() - log_probs_base.float()
    if kl_loss_type == "k1":
        kl = d
    elif kl_loss_type == "k2":
        kl = d.square() / 2
    else:
        if kl_loss_type == "low_var_kl":
            d = torch.where(torch.isnan(d), 0.0, d)
        d = d.clamp(-_MAX_LOG_RATIO, _MAX_LOG_RATIO)
        kl = torch.expm1(-d) + d
    if importance_ratio is not None:
        kl = kl * importance_ratio
    return kl.clamp(-_MAX_LOW_VAR_KL, _MAX_LOW_VAR_KL) if kl_loss_type == "low_var_kl" else kl


def importance_ratio(log_probs: Tensor, old_log_probs: Tensor) -> Tensor:
    """p / p_old at each sampled token, the log-ratio clamped to 20 either way."""
    return (log_probs.float() - old_log_probs.float()).clamp(-_MAX_LOG_RATIO, _MAX_LOG_RATIO).exp()
