"""Outcomes of samples: which exceptions are which failure, and when a batch must stop."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterable

from miles.backends.engine_api.errors import EngineRejected, EngineStartError
from miles.rollout.rm_hub.failures import WAYS_OUT
from miles.router.engine_pool import NoEngineError
from miles.utils.types import Sample, SampleStatus

logger = logging.getLogger(__name__)

FINAL = (SampleStatus.COMPLETED, SampleStatus.TRUNCATED)


class RolloutError(RuntimeError):
    """A rollout that cannot give a batch; the message has the counts."""


def failure_category(error: Exception, default: str) -> str:
    """The name that metrics count an exception under: its own `category`, else `default`."""
    return getattr(error, "category", None) or default


def is_permanent(error: Exception) -> bool:
    """Whether doing the same again cannot help: the error says so, or the engine refused the request itself (4xx)."""
    return bool(getattr(error, "permanent", False)) or isinstance(error, EngineRejected)


def is_fatal(error: Exception) -> bool:
    """Whether no sample can be generated any more: the engines are gone and do not come back."""
    return isinstance(error, NoEngineError | EngineStartError)


def flatten(group: Iterable[Sample | list[Sample]]) -> list[Sample]:
    """Samples of a group, also where one execution gave several (`list[list[Sample]]`)."""
    return [s for entry in group for s in (flatten(entry) if isinstance(entry, list) else [entry])]


def first_index(group: Iterable[Sample | list[Sample]]) -> int:
    """The index of a group's first sample: groups are ordered by it."""
    index = flatten(group)[0].index
    if index is None:
        raise ValueError("a sample has no index")
    return index


def group_failures(group: Iterable[Sample | list[Sample]]) -> list[Sample]:
    """Samples of a group that must not train: failed, aborted, or never finished."""
    return [s for s in flatten(group) if s.status not in FINAL or s.reward is None]


class FailureLog:
    """Failed groups of one rollout, counted; stops the rollout when too many fail.

    Args:
        max_ratio: share of the requested groups, replacements of failed ones included, that may fail (`--max-failed-group-ratio`).
        target: groups in a batch; the share is taken of at least that many.
    """

    def __init__(self, max_ratio: float, target: int) -> None:
        self.max_ratio, self.target = max_ratio, target
        self.groups = 0
        self.categories: Counter[str] = Counter()
        self.messages: list[str] = []

    def add(self, failed: list[Sample]) -> None:
        """Count one group by its failed samples."""
        self.groups += 1
        for sample in failed:
            failure = sample.failure
            category = failure.category if failure else f"unfinished_{sample.status.value}"
            message = failure.message if failure else f"sample {sample.index} ended as {sample.status.value}"
            self.categories[category] += 1
            self.messages.append(f"{category}: {message}")
        logger.warning("group %s dropped: %s", failed[0].group_index, "; ".join(self.messages[-len(failed) :]))

    def check(self, requested: int) -> None:
        """Raises: RolloutError when more than the allowed share of the requested groups failed."""
        if self.groups <= self.max_ratio * max(requested, self.target):
            return
        counts = ", ".join(f"{name} {count}" for name, count in sorted(self.categories.items()))
        raise RolloutError(
            f"{self.groups} of {requested} groups failed, more than --max-failed-group-ratio {self.max_ratio} allows "
            f"({counts}). First failures:\n  " + "\n  ".join(self.messages[:3]) + self._ways_out()
        )

    def _ways_out(self) -> str:
        known = [name for name, _ in self.categories.most_common() if name in WAYS_OUT]
        return "".join(f"\nWhat to do about {name}: {WAYS_OUT[name]}" for name in known)

    def metrics(self) -> dict[str, float]:
        counts = {f"rollout/error_cat/{name}": float(n) for name, n in sorted(self.categories.items())}
        return {"rollout/failed_groups": float(self.groups)} | counts
