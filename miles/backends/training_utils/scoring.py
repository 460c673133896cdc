"""Which forward passes a rollout batch needs before its first optimizer step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from miles.backends.training_utils.backend import TrainShard
from miles.backends.training_utils.loss_hub.corrections import needs_step_sums


@dataclass(frozen=True)
class ScoringPlan:
    """`policy`: score the batch under the policy's weights before training. `reference`: under the reference model's.

    `values`: under the critic, for its own loss. `old_is_current`: no pass is needed for the old log-probs, because the batch trains in one optimizer step: the
    training pass computes the very same numbers, and the ratio is 1.
    """

    policy: bool
    reference: bool
    old_is_current: bool
    values: bool = False


def plan_scoring(args: Any, shard: TrainShard, *, deterministic_forward: bool = True) -> ScoringPlan:
    """Decide the passes for a shard; the same on every rank.

    Args:
        deterministic_forward: two forward passes of the same weights give the same numbers (no dropout). Otherwise the
            old log-probs are always scored.
    Raises: ValueError where `--skip-actor-forward-only` meets a batch that it cannot be true for.
    """
    loss_type = getattr(args, "loss_type", "policy_loss")
    if loss_type == "value_loss":
        return ScoringPlan(False, False, False, values=True)
    if loss_type == "sft_loss" or not getattr(args, "compute_advantages_and_returns", True):
        return ScoringPlan(False, False, False)
    if getattr(args, "skip_actor_forward_only", False):
        _check_skippable(args, shard, deterministic_forward)
    shaped = bool(getattr(args, "kl_coef", 0.0)) or bool(getattr(args, "use_opd", False))
    # A custom loss finds log_probs in its batch, as if there were several steps.
    single = (
        loss_type == "policy_loss"
        and len(shard.steps) == 1
        and deterministic_forward
        and not getattr(args, "keep_old_actor", False)
        and not needs_step_sums(args)
    )
    brought = "log_probs" in shard.columns
    skip = single and not shaped and not brought
    reference = bool(getattr(args, "use_kl_loss", False)) or bool(getattr(args, "kl_coef", 0.0))
    return ScoringPlan(policy=not skip and not brought, reference=reference, old_is_current=skip)


def _check_skippable(args: Any, shard: TrainShard, deterministic_forward: bool) -> None:
    problems = []
    if len(shard.steps) != 1:
        problems.append(f"the batch trains in {len(shard.steps)} optimizer steps, and from the second on they differ")
    if not deterministic_forward:
        problems.append("the model has dropout")
    for name in ("kl_coef", "use_opd", "keep_old_actor"):
        if getattr(args, name, None):
            problems.append(f"--{name.replace('_', '-')} needs them before training")
    if needs_step_sums(args):
        problems.append("the correction sums over the whole step before it starts")
    if "log_probs" in shard.columns:
        problems.append("the batch brings log_probs of its own")
    if problems:
        raise ValueError(
            f"--skip-actor-forward-only takes current log-probs for the old ones, but {'; '.join(problems)}"
        )
