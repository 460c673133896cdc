"""From a rollout function's groups to the flat list of samples that is trained; nothing is trimmed to fit."""

from __future__ import annotations

from typing import Any

from miles.rollout.failures import RolloutError
from miles.utils.types import Sample, SampleStatus

_LISTED = 10


class BatchError(RolloutError):
    """A batch that cannot be trained as it is; the message has the numbers and the samples."""


def _executions(entry: Any) -> list[list[Sample]]:
    """The executions below one entry of a group: a sample is one of its own, an innermost list of samples is one."""
    if isinstance(entry, Sample):
        return [[entry]]
    if not isinstance(entry, list):
        raise BatchError(f"the rollout function returned a {type(entry).__name__} among its samples")
    if all(isinstance(item, Sample) for item in entry):
        return [entry]
    return [execution for item in entry for execution in _executions(item)]


def _check_compact_ids(groups: list) -> list[str]:
    problems = []
    for position, group in enumerate(groups):
        for entry in group:
            for execution in _executions(entry):
                ids = {sample.rollout_id for sample in execution}
                if len(execution) > 1 and (len(ids) > 1 or None in ids):
                    problems.append(
                        f"group {position}: {len(execution)} samples of one execution have rollout ids {sorted(map(str, ids))}"
                    )
    return problems


def _check_outcomes(samples: list[Sample]) -> list[str]:
    unusable = (SampleStatus.ABORTED, SampleStatus.FAILED)
    return [
        f"sample {s.index} is {s.status.value} with reward {s.reward}"
        for s in samples
        if s.status in unusable or s.reward is None
    ]


def _raise_if_any(problems: list[str], way_out: str) -> None:
    if problems:
        more = f" (and {len(problems) - _LISTED} more)" if len(problems) > _LISTED else ""
        raise BatchError("; ".join(problems[:_LISTED]) + f"{more}. {way_out}")


def _batch_size_metadata(args: Any, num_rollouts: int) -> dict[str, Any]:
    """Check rollouts against optimizer steps, or make one step of all of them where the batch size is dynamic."""
    if getattr(args, "use_dynamic_global_batch_size", False):
        return {"dynamic_global_batch_size": num_rollouts}
    size = getattr(args, "global_batch_size", None) or num_rollouts
    rest = num_rollouts % size
    if rest and not getattr(args, "allow_partial_train_step", False):
        raise BatchError(
            f"{num_rollouts} rollouts do not make whole optimizer steps: {num_rollouts} = {num_rollouts // size} x "
            f"--global-batch-size {size} + {rest}. --rollout-batch-size {args.rollout_batch_size} x --n-samples-per-prompt "
            f"{args.n_samples_per_prompt} must be a multiple of it, and the rollout function must return full batches; "
            "or pass --allow-partial-train-step, or --use-dynamic-global-batch-size for one step of whatever there is."
        )
    return {}


def postprocess_rollout(args: Any, groups: list) -> tuple[list[Sample], dict[str, Any]]:
    """Check and flatten `[groups][samples]`, `[groups][executions][samples]`, or a list that is flat already.

    Returns: the samples in order, and metadata for the conversion (`dynamic_global_batch_size`).
    Raises: BatchError for samples without a usable outcome, siblings without one rollout id, a batch that is empty or
        does not divide into optimizer steps.
    """
    groups = [[group] if isinstance(group, Sample) else group for group in groups]
    samples = [
        sample for group in groups for entry in group for execution in _executions(entry) for sample in execution
    ]
    if not samples:
        raise BatchError("the rollout function returned no samples")
    _raise_if_any(
        _check_outcomes(samples),
        "Such samples never train: the rollout function must drop or regenerate their groups "
        "(--dynamic-sampling-filter-path miles.rollout.filter_hub.dynamic_sampling_filters.check_no_aborted drops them).",
    )
    _raise_if_any(
        _check_compact_ids(groups),
        "Samples of one execution share one rollout_id: set it in the generate function.",
    )
    rollouts = {position if s.execution_id is None else s.execution_id for position, s in enumerate(samples)}
    return samples, _batch_size_metadata(args, len(rollouts))
