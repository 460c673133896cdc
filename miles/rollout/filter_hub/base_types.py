"""The verdict of a dynamic filter, and how filters are called."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np


@dataclass(frozen=True)
class DynamicFilterOutput:
    """Whether a group trains; `reason` names the drop in the metric `rollout/dynamic_filter/drop_<reason>`."""

    keep: bool
    reason: str | None = None


def call_dynamic_filter(filter_function: Callable | None, args: Any, group: list) -> DynamicFilterOutput:
    """Ask a filter about a group of samples, `[samples]` or `[executions][samples]`. No filter keeps everything.

    Raises: TypeError when the filter's answer is neither a DynamicFilterOutput nor a bool.
    """
    if filter_function is None:
        return DynamicFilterOutput(keep=True)
    verdict = filter_function(args, group)
    if isinstance(verdict, DynamicFilterOutput):
        return verdict
    if isinstance(verdict, bool | np.bool_):
        return DynamicFilterOutput(keep=bool(verdict))
    raise TypeError(
        f"--dynamic-sampling-filter-path: expected DynamicFilterOutput or bool, got {type(verdict).__name__}"
    )
