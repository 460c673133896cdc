"""From rewards to advantages: estimator, distillation, whitening. Runs once a rollout batch on every rank."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from miles.backends.training_utils.backend import TrainData
from miles.backends.training_utils.loss_hub.base import AdvantageInputs
from miles.backends.training_utils.loss_hub.kl import compute_approx_kl
from miles.backends.training_utils.loss_hub.opd import distill, reverse_kl
from miles.backends.training_utils.loss_hub.registry import get_estimator
from miles.backends.training_utils.loss_hub.whitening import AllReduceSum, whiten


@dataclass(frozen=True)
class AdvantageColumns:
    """fp32 `[response]` a sample, detached. `opd_reverse_kl` is None without distillation."""

    advantages: list[Tensor]
    returns: list[Tensor]
    kl: list[Tensor]
    opd_reverse_kl: list[Tensor] | None

    def write_to(self, columns: TrainData) -> None:
        """Store as the columns of the same names."""
        columns.update(advantages=self.advantages, returns=self.returns)
        if self.opd_reverse_kl is not None:
            columns["opd_reverse_kl"] = self.opd_reverse_kl


def compute_advantages(
    args: Any,
    columns: TrainData,
    log_probs: Sequence[Tensor] | None = None,
    ref_log_probs: Sequence[Tensor] | None = None,
    all_reduce: AllReduceSum | None = None,
) -> AdvantageColumns:
    """Advantages and returns of a shard's samples. Collective with `--normalize-advantages`.

    Args:
        columns: a shard's; `rewards`, `loss_masks` and, for PPO, `values`, for distillation, `teacher_log_probs` are read.
        log_probs: the policy's own before the update, fp32 `[response]` a sample; needed for KL shaping and distillation.
        ref_log_probs: the reference's; needed with `--kl-coef`.
        all_reduce: sums over the ranks that hold other samples; None for a single rank.
    Raises: ValueError naming the flag whose input is missing.
    """
    estimator = get_estimator(args.advantage_estimator)
    whitened = bool(getattr(args, "normalize_advantages", False))
    if estimator.needs_whitening and not whitened:
        raise ValueError(f"--advantage-estimator {estimator.name} needs --normalize-advantages")
    masks = [torch.tensor(m, dtype=torch.float32) for m in columns["loss_masks"]]
    rewards = [float(r) for r in columns["rewards"]]
    kl = _reward_kl(args, masks, log_probs, ref_log_probs)
    values = _floats(columns.get("values")) if estimator.needs_values else None
    advantages, returns = estimator.advantages(args, AdvantageInputs(rewards, masks, kl, values))
    distilled = None
    if getattr(args, "use_opd", False):
        given = _floats(columns.get("opd_reverse_kl"))
        distilled = reverse_kl(log_probs, _floats(columns.get("teacher_log_probs")), given)
        advantages = distill(args, advantages, distilled)
    if whitened:
        advantages = whiten(advantages, masks, all_reduce)
    return AdvantageColumns([a.detach() for a in advantages], [r.detach() for r in returns], kl, distilled)


def _reward_kl(
    args: Any, masks: list[Tensor], log_probs: Sequence[Tensor] | None, ref: Sequence[Tensor] | None
) -> list[Tensor]:
    if not getattr(args, "kl_coef", 0.0):
        return [torch.zeros_like(m) for m in masks]
    if log_probs is None or ref is None:
        side = "the policy's own" if log_probs is None else "the reference's"
        raise ValueError(f"--kl-coef {args.kl_coef} shapes rewards by KL, and {side} log-probs were not scored")
    return [
        torch.where(m > 0, compute_approx_kl(p.detach(), q.detach(), args.kl_loss_type), 0.0)
        for m, p, q in zip(masks, log_probs, ref, strict=True)
    ]


def _floats(column: Sequence[Any] | None) -> list[Tensor] | None:
    if column is None or any(x is None for x in column):
        return None
    return [torch.as_tensor(x, dtype=torch.float32).detach() for x in column]
