"""Metrics of a step that do not depend on how it was split into micro-batches and ranks.

Every micro-batch adds *contributions*; ranks are joined by one all-gather at the end of the step:

- `add(name, x)`: contributions that add up to the value, such as a loss already divided by the step's normaliser;
- `add_ratio(name, total, count)`: totals over counts, such as a mean over tokens; 0 where the count is 0;
- `add_max`, `add_min`.

Sums are taken in fp64 and in rank order, so that a value is the same on every rank and in every run.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable

import torch
from torch import Tensor

# Gathers one fp64 vector from every rank: [n] -> [world, n], the same on all.
AllGather = Callable[[Tensor], Tensor]

_PAD = 512


class StepMetrics:
    """Accumulates one optimizer step's metrics on one rank. Values stay on their device until `reduce`."""

    def __init__(self) -> None:
        self._kinds: dict[str, str] = {}
        self._values: dict[str, list[Tensor]] = {}

    def add(self, name: str, contribution: Tensor | float) -> None:
        self._put(name, "sum", contribution, 0.0)

    def add_ratio(self, name: str, total: Tensor | float, count: Tensor | float) -> None:
        self._put(name, "ratio", total, count)

    def add_max(self, name: str, value: Tensor | float) -> None:
        self._put(name, "max", value, 0.0)

    def add_min(self, name: str, value: Tensor | float) -> None:
        self._put(name, "min", value, 0.0)

    def _put(self, name: str, kind: str, first: Tensor | float, second: Tensor | float) -> None:
        if self._kinds.setdefault(name, kind) != kind:
            raise ValueError(f"metric {name} was {self._kinds[name]} before and is {kind} now: one name, one kind")
        pair = torch.stack([_scalar(first), _scalar(second).to(_scalar(first).device)])
        held = self._values.get(name)
        if held is None:
            self._values[name] = [pair]
        else:
            held.append(pair)

    def merge(self, other: StepMetrics) -> None:
        """Take over another accumulator's contributions."""
        for name, kind in other._kinds.items():
            if self._kinds.setdefault(name, kind) != kind:
                raise ValueError(f"metric {name} is both {self._kinds[name]} and {kind}: one name, one kind")
            self._values.setdefault(name, []).extend(other._values[name])

    def reduce(self, all_gather: AllGather | None = None) -> dict[str, float]:
        """Join all ranks in one collective and return the values, the same on each. Collective if `all_gather` is given.

        Raises: ValueError where ranks hold different metrics.
        """
        names = sorted(self._kinds)
        pairs = [_fold(self._kinds[name], torch.stack(self._values[name]).cpu()) for name in names]
        local = torch.cat([torch.tensor([_signature(self._kinds)], dtype=torch.float64), *pairs])
        # Padded, so that ranks with different metrics meet in the collective and then see it, instead of hanging there.
        local = torch.nn.functional.pad(local, (0, -len(local) % _PAD))
        rows = all_gather(local) if all_gather is not None else local[None]
        if bool((rows[:, 0] != rows[0, 0]).any()):
            raise ValueError(f"ranks hold different metrics; this one has {', '.join(names)}")
        joined = rows[:, 1 : 1 + 2 * len(names)].reshape(rows.shape[0], len(names), 2)
        result = {}
        for column, name in enumerate(names):
            first, second = _fold(self._kinds[name], joined[:, column]).tolist()
            ratio = first / second if second else 0.0
            result[name] = ratio if self._kinds[name] == "ratio" else first
        return result


def _scalar(value: Tensor | float) -> Tensor:
    return torch.as_tensor(value).detach().to(torch.float64).reshape(())


def _fold(kind: str, pairs: Tensor) -> Tensor:
    """Join pairs `[n, 2]` into one `[2]`."""
    if kind == "max":
        return pairs.max(dim=0).values
    if kind == "min":
        return pairs.min(dim=0).values
    return pairs.sum(dim=0)


def _signature(kinds: dict[str, str]) -> float:
    """48 bits of a hash of names and kinds: exact in fp64."""
    text = "\n".join(f"{name} {kinds[name]}" for name in sorted(kinds))
    return float(int.from_bytes(hashlib.sha256(text.encode()).digest()[:6], "big"))
