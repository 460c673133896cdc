"""A step that is not finite never passes for a trained one."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from miles.backends.training_utils.backend import TrainData
from miles.backends.training_utils.columns import RESPONSE_COLUMNS

_LISTED = 10


class NonFiniteError(RuntimeError):
    """Loss, gradient or log-probs of a step are NaN or infinite; the weights are still those from before the step."""


def check_step_is_finite(
    args: Any,
    metrics: dict[str, float],
    grad_norm: float,
    *,
    rollout_id: int,
    step: int,
    suspects: Callable[[], Sequence[str]] = lambda: (),
) -> bool:
    """Whether the optimizer may step. Call it with reduced values, after backward and before the optimizer.

    The values are the same on every rank, so all ranks decide alike.

    Args:
        suspects: what `nonfinite_samples` finds on all ranks; asked for only where the run stops.
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
        found = list(suspects())
        if found:
            more = f" and {len(found) - _LISTED} more" if len(found) > _LISTED else ""
            problems.append(f"not finite are: {'; '.join(found[:_LISTED])}{more}")
        raise NonFiniteError(
            f"rollout {rollout_id}, optimizer step {step}: {', '.join(problems)}. The step was not taken. Look at the "
            "learning rate and at train/train_rollout_logprob_abs_diff of the steps before; "
            "--no-check-for-nan-in-loss-and-grad skips and counts such steps instead of stopping"
        )
    return False


def nonfinite_samples(columns: TrainData, indices: Sequence[int], current: Mapping[int, Tensor]) -> list[str]:
    """Which of the samples `indices` have values that are not finite at tokens that train, and in which columns.

    `current`: log-probs of the training pass by index, where they were kept.
    """
    names = columns.get("sample_indices")
    found = []
    for i in indices:
        trains = torch.as_tensor(columns["loss_masks"][i]) > 0
        held = {name: columns[name][i] for name in RESPONSE_COLUMNS if columns.get(name) is not None}
        held["log_probs of the training pass"] = current.get(i)
        bad = [
            name
            for name, value in held.items()
            if value is not None and not bool(torch.isfinite(torch.as_tensor(value)[trains]).all())
        ]
        if bad:
            found.append(f"sample {i if names is None else names[i]} ({', '.join(bad)})")
    return found
