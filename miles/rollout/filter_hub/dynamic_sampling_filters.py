"""The built-in dynamic filters. All take a group as `[samples]` or, where executions fan out, `[executions][samples]`."""

from __future__ import annotations

import statistics
from typing import Any

from miles.rollout.failures import flatten
from miles.rollout.filter_hub.base_types import DynamicFilterOutput
from miles.utils.types import Sample, SampleStatus

_MIN_STD = 1e-8


def execution_rewards(args: Any, group: list) -> list[float]:
    """One reward an execution: siblings of one execution share theirs."""
    rewards: dict[Any, float] = {}
    for position, sample in enumerate(flatten(group)):
        key = position if sample.execution_id is None else sample.execution_id
        rewards.setdefault(key, float(sample.get_reward_value(args)))  # type: ignore[arg-type]
    return list(rewards.values())


def check_reward_nonzero_std(args: Any, group: list[Sample] | list[list[Sample]], **kwargs: Any) -> DynamicFilterOutput:
    """Drop groups whose rewards are all the same: they carry no advantage."""
    rewards = execution_rewards(args, group)
    if len(rewards) > 1 and statistics.pstdev(rewards) > _MIN_STD:
        return DynamicFilterOutput(keep=True)
    return DynamicFilterOutput(keep=False, reason=f"zero_std_{round(rewards[0], 1)}")


def check_no_aborted(args: Any, group: list[Sample] | list[list[Sample]], **kwargs: Any) -> DynamicFilterOutput:
    """Drop groups with an aborted sample. The default rollout function never hands one out; custom ones may."""
    if any(sample.status is SampleStatus.ABORTED for sample in flatten(group)):
        return DynamicFilterOutput(keep=False, reason="group_has_aborted")
    return DynamicFilterOutput(keep=True)
