"""A step that is not finite never passes for a trained one."""

from __future__ import annotations

import math
from typing import Any


class NonFiniteError(RuntimeError):
    """Loss, gradient or log-probs of a step are NaN or infinite; the weights are still those from before the step."""


def check_step_is_finite(args: Any, metrics: dict[str, float], grad_norm: float, *, rollout_id: int, step: int) -> bool:
    """Whether the optimizer may step. Call it with reduced values, after backward and before the optimizer.

    The values are the same on every rank, so all ranks decide alike.

    Returns: True for a finite step; False, with `metrics["train/nonfinite_steps"]` 1, for one that is to be skipped
        and counted, under `--no-check-for-nan-in-loss-and-grad`.
    Raises: NonFiniteError without that flag.
    """
    loss = metrics.get("train/loss", 0.0)
    tokens = metrics.get("train/nonfinite_tokens", 0.0)
    problems = []
    if not math.isfinite(loss):
        problems.append(f"the loss is {loss}")
    if not math.isfinite(grad_norm):
        problems.append(f"the gradient norm is {grad_norm}")
    if tokens:
        problems.append(f"{tokens:.0f} trained tokens have log-probs or advantages that are not finite")
    metrics["train/nonfinite_steps"] = float(bool(problems))
    if not problems:
        return True
    if getattr(args, "check_for_nan_in_loss_and_grad", True):
        raise NonFiniteError(
            f"rollout {rollout_id}, optimizer step {step}: {', '.join(problems)}. The step was not taken. Look at the "
            "learning rate and at train/train_rollout_logprob_abs_diff of the steps before; "
            "--no-check-for-nan-in-loss-and-grad skips and counts such steps instead of stopping"
        )
    return False
