"""Metrics of a step that do not depend on how it was split into micro-batches and ranks.

Every micro-batch adds *contributions*; ranks are joined by one all-gather at the end of the step:

- `add(name, x)`: contributions that add up to the value, such as a loss already divided by the step's normaliser;
- `add_ratio(name, total, count)`: totals over counts, such as a mean over tokens; 0 where the count is 0;
- `add_max`, `add_min`;
- `add_ess(name, weights)`: effective sample size of importance weights;
- `add_explained_variance(name, target, prediction)`;
- `add_quantiles(name, log_ratios)`: quantiles of a distribution of ratios, from counts in fixed bins.

Sums are taken in fp64 and in rank order, so that a value is the same on every rank and in every run.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

# Gathers one fp64 vector from every rank: [n] -> [world, n], the same on all.
AllGather = Callable[[Tensor], Tensor]

_PAD = 512


# |log ratio| from 1e-4 to 20 in steps of a tenth, both signs, and one bin around 0 between them.
_LOG_EDGES = torch.logspace(-4, 1.3010299956639813, 129, dtype=torch.float64)
_EDGES = torch.cat([-_LOG_EDGES.flip(0), _LOG_EDGES])
_QUANTILES = {"p01": 0.01, "p50": 0.5, "p99": 0.99}


class StepMetrics:
    """Accumulates one optimizer step's metrics on one rank. Values stay on their device until `reduce`."""

    def __init__(self) -> None:
        self._kinds: dict[str, str] = {}
        self._values: dict[str, list[Tensor]] = {}

    def add(self, name: str, contribution: Tensor | float) -> None:
        self._put(name, "sum", contribution)

    def add_ratio(self, name: str, total: Tensor | float, count: Tensor | float) -> None:
        self._put(name, "ratio", total, count)

    def add_max(self, name: str, value: Tensor | float) -> None:
        self._put(name, "max", value)

    def add_min(self, name: str, value: Tensor | float) -> None:
        self._put(name, "min", value)

    def add_ess(self, name: str, weights: Tensor) -> None:
        """(sum w)^2 / (n sum w^2) of all weights of the step, `[n]` here: 1 where all are equal, 1/n where one rules."""
        w = weights.detach().double()
        self._put(name, "ess", w.sum(), w.square().sum(), w.numel())

    def add_explained_variance(self, name: str, target: Tensor, prediction: Tensor) -> None:
        """1 - Var(target - prediction) / Var(target) over all of the step, `[n]` each: 1 perfect, 0 as good as the mean."""
        g, error = target.detach().double(), (target - prediction).detach().double()
        sums = (x for y in (g, error) for x in (y.sum(), y.square().sum()))
        self._put(name, "explained", *sums, g.numel())

    def add_quantiles(self, name: str, log_ratios: Tensor) -> None:
        """`{name}/p01`, `p50` and `p99` of exp of all `log_ratios` of the step, `[n]` here, no NaN among them.

        A quantile is the middle of its bin: log ratios are true to 5 %, those below 1e-4 count as 0.
        """
        bins = torch.bucketize(log_ratios.detach().double(), _EDGES.to(log_ratios.device))
        self._store(name, "quantiles", torch.bincount(bins, minlength=len(_EDGES) + 1).double())

    def _put(self, name: str, kind: str, *values: Tensor | float) -> None:
        first = _scalar(values[0])
        self._store(name, kind, torch.stack([first, *(_scalar(v).to(first.device) for v in values[1:])]))

    def _store(self, name: str, kind: str, vector: Tensor) -> None:
        if self._kinds.setdefault(name, kind) != kind:
            raise ValueError(f"metric {name} was {self._kinds[name]} before and is {kind} now: one name, one kind")
        self._values.setdefault(name, []).append(vector)

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
        kinds = [_KINDS[self._kinds[name]] for name in names]
        vectors = [kind.join(torch.stack(self._values[name]).cpu()) for name, kind in zip(names, kinds, strict=True)]
        local = torch.cat([torch.tensor([_signature(self._kinds)], dtype=torch.float64), *vectors])
        # Padded, so that ranks with different metrics meet in the collective and then see it, instead of hanging there.
        local = torch.nn.functional.pad(local, (0, -len(local) % _PAD))
        rows = all_gather(local) if all_gather is not None else local[None]
        if bool((rows[:, 0] != rows[0, 0]).any()):
            raise ValueError(f"ranks hold different metrics; this one has {', '.join(names)}")
        result, start = {}, 1
        for name, kind, vector in zip(names, kinds, vectors, strict=True):
            stop = start + len(vector)
            for ending, value in kind.finish(kind.join(rows[:, start:stop])).items():
                result[name + ending] = value
            start = stop
        return result


@dataclass(frozen=True)
class _Kind:
    """`join`: contributions `[n, width]` into one `[width]`; `finish`: that into values by what they add to the name."""

    join: Callable[[Tensor], Tensor]
    finish: Callable[[Tensor], dict[str, float]]


def _sum(rows: Tensor) -> Tensor:
    return rows.sum(dim=0)


def _alone(joined: Tensor) -> dict[str, float]:
    return {"": float(joined[0])}


def _ratio(joined: Tensor) -> dict[str, float]:
    total, count = joined.tolist()
    return {"": total / count if count else 0.0}


def _ess(joined: Tensor) -> dict[str, float]:
    total, squares, count = joined.tolist()
    return {"": total**2 / (count * squares) if squares else 0.0}


def _explained(joined: Tensor) -> dict[str, float]:
    total, squares, error, error_squares, count = joined.tolist()
    if not count:
        return {"": 0.0}
    variance, unexplained = squares / count - (total / count) ** 2, error_squares / count - (error / count) ** 2
    return {"": 1 - unexplained / variance if variance > 1e-12 else 0.0}


def _quantiles(counts: Tensor) -> dict[str, float]:
    below = counts.cumsum(0)
    if not below[-1]:
        return {f"/{name}": 0.0 for name in _QUANTILES}
    # The middle of each bin; on the far sides, where it has no end, its edge.
    middles = torch.cat([_EDGES[:1], (_EDGES[1:] + _EDGES[:-1]) / 2, _EDGES[-1:]])
    wanted = {f"/{name}": torch.tensor([q * float(below[-1])], dtype=below.dtype) for name, q in _QUANTILES.items()}
    return {name: float(middles[torch.searchsorted(below, rank)].exp()) for name, rank in wanted.items()}


_KINDS = {
    "sum": _Kind(_sum, _alone),
    "ratio": _Kind(_sum, _ratio),
    "max": _Kind(lambda rows: rows.max(dim=0).values, _alone),
    "min": _Kind(lambda rows: rows.min(dim=0).values, _alone),
    "ess": _Kind(_sum, _ess),
    "explained": _Kind(_sum, _explained),
    "quantiles": _Kind(_sum, _quantiles),
}


def _scalar(value: Tensor | float) -> Tensor:
    return torch.as_tensor(value).detach().to(torch.float64).reshape(())


def _signature(kinds: dict[str, str]) -> float:
    """48 bits of a hash of names and kinds: exact in fp64."""
    text = "\n".join(f"{name} {kinds[name]}" for name in sorted(kinds))
    return float(int.from_bytes(hashlib.sha256(text.encode()).digest()[:6], "big"))
