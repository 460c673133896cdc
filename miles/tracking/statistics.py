"""Summaries of lists of numbers. Sums are exact before rounding, so that order never matters."""

from __future__ import annotations

import math
import statistics
import zlib
from collections.abc import Iterable, Sequence

Metrics = dict[str, float]


def mean(values: Iterable[float]) -> float:
    values = list(values)
    return math.fsum(values) / len(values)


def describe(prefix: str, values: Sequence[float]) -> Metrics:
    """`{prefix}/mean`, `median`, `max`, `min`; nothing for no values."""
    if not values:
        return {}
    return {
        f"{prefix}/mean": mean(values),
        f"{prefix}/median": float(statistics.median(values)),
        f"{prefix}/max": float(max(values)),
        f"{prefix}/min": float(min(values)),
    }


def pass_at_k(n: int, correct: int, k: int) -> float:
    """Chance that one of `k` samples drawn from `n`, `correct` of them right, is right.

    Source: Chen et al. 2021, "Evaluating Large Language Models Trained on Code", equation 1.
    """
    return 1.0 - math.comb(n - correct, k) / math.comb(n, k)


_REPETITION_WINDOW, _REPETITION_RATIO = 10_000, 10.0


def is_repetitive(text: str) -> bool:
    """Whether the last 10,000 characters of a longer text compress more than tenfold: a model in a loop."""
    if len(text) <= _REPETITION_WINDOW:
        return False
    tail = text[-_REPETITION_WINDOW:].encode()
    return len(tail) / len(zlib.compress(tail)) > _REPETITION_RATIO
