"""Which forward passes a rollout batch needs before its first optimizer step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from miles.backends.training_utils.backend import TrainShard


@dataclass(frozen=True)
class ScoringPlan:
    """`policy`: score the batch under the policy's weights before training. `reference`: under the reference model's.

    `old_is_current`: no pass is needed for the old log-probs, because the batch trains in one optimizer step: the
    training pass computes the very same numbers, and the ratio is 1.
    """

    policy: bool
    reference: bool
    old_is_current: bool


def plan_scoring(args: Any, shard: TrainShard, *, deterministic_forward: bool = True) -> ScoringPlan:
    """Decide the passes for a shard; the same on every rank.

    Args:
        deterministic_forward: two forward passes of the same weights give the same numbers (no dropout). Otherwise the
            old log-probs are always scored.
    """
    if getattr(args, "loss_type", "policy_loss") != "policy_loss":
        return ScoringPlan(False, False, False)
    shaped = bool(getattr(args, "kl_coef", 0.0)) or bool(getattr(args, "use_opd", False))
    single = len(shard.steps) == 1 and deterministic_forward and not getattr(args, "keep_old_actor", False)
    skip = (single or bool(getattr(args, "skip_actor_forward_only", False))) and not shaped
    if "log_probs" in shard.columns:
        skip = False  # the batch brings them
    reference = bool(getattr(args, "use_kl_loss", False)) or bool(getattr(args, "kl_coef", 0.0))
    return ScoringPlan(policy=not skip and "log_probs" not in shard.columns, reference=reference, old_is_current=skip)
