"""Step axes: `rollout/step` counts rollouts, `train/step` optimizer steps, `eval/step` the weights that were evaluated."""

from __future__ import annotations

from typing import Any

ROLLOUT, TRAIN, EVAL = "rollout/step", "train/step", "eval/step"
STEP_KEYS = (ROLLOUT, TRAIN, EVAL)


def train_steps_per_rollout(args: Any) -> int:
    """Optimizer steps that one rollout's batch is split into: 1 where the global batch size is dynamic."""
    if getattr(args, "use_dynamic_global_batch_size", False) or not getattr(args, "global_batch_size", None):
        return 1
    return max(1, args.rollout_batch_size * args.n_samples_per_prompt // args.global_batch_size)


def compute_rollout_step(args: Any, rollout_id: int) -> int:
    """Where a rollout lies on the axes `rollout/step` and `eval/step`: its id, or, with `--wandb-always-use-train-step`,
    the optimizer steps before it."""
    if getattr(args, "wandb_always_use_train_step", False):
        return rollout_id * train_steps_per_rollout(args)
    return rollout_id
