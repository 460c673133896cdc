"""Which engine takes a request: the one that has its prefix in the cache, else the least busy one."""

from __future__ import annotations

import contextlib
from collections import Counter, OrderedDict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

_MAX_STICKY_KEYS = 100_000


@dataclass(frozen=True)
class Place:
    """An engine, and one of its data-parallel ranks, each of which has a prefix cache of its own.

    `rank` is None where the engine has one rank, and for requests without a key, which the engine itself spreads.
    """

    index: int
    rank: int | None = None

    def addressed(self, payload: dict[str, Any]) -> dict[str, Any]:
        """A body of `/generate` for this rank of the engine."""
        return payload if self.rank is None else payload | {"routed_dp_rank": self.rank}


class Affinity:
    """Places of requests in flight, and of routing keys.

    A key keeps its place while the engine serves. Engines, and ranks within one, are taken with the fewest requests in
    flight, the lowest index among equals; among idle ranks, the one with the fewest keys.
    """

    def __init__(self) -> None:
        self._engine_load: Counter[int] = Counter()
        self._place_load: Counter[Place] = Counter()
        self._keys_of: Counter[Place] = Counter()
        self._sticky: OrderedDict[str, Place] = OrderedDict()

    def load(self, index: int) -> int:
        """Requests in flight on an engine."""
        return self._engine_load[index]

    def choose(self, ranks: Mapping[int, int], key: str | None, avoid: frozenset[int]) -> Place:
        """A place among the engines that serve.

        Args:
            ranks: data-parallel ranks of each engine; not empty.
            avoid: engines that just failed this request; one of them is taken only when there is no other.
        """
        if key is not None and (place := self._sticky.get(key)) is not None:
            if place.index not in avoid and (place.rank or 0) < ranks.get(place.index, 0):
                self._sticky.move_to_end(key)
                return place
            self._forget(key)
        candidates = [i for i in ranks if i not in avoid] or list(ranks)
        index = min(candidates, key=lambda i: (self._engine_load[i], i))
        if key is None:
            return Place(index)
        place = self._rank_of(index, ranks[index])
        self._sticky[key] = place
        self._keys_of[place] += 1
        if len(self._sticky) > _MAX_STICKY_KEYS:
            self._forget(next(iter(self._sticky)))
        return place

    @contextlib.contextmanager
    def counted(self, place: Place) -> Iterator[None]:
        """A request in flight there."""
        self._engine_load[place.index] += 1
        self._place_load[place] += 1
        try:
            yield
        finally:
            self._engine_load[place.index] -= 1
            self._place_load[place] -= 1

    def _rank_of(self, index: int, ranks: int) -> Place:
        if ranks == 1:
            return Place(index)
        places = [Place(index, rank) for rank in range(ranks)]
        return min(places, key=lambda p: (self._place_load[p], self._keys_of[p], p.rank))

    def _forget(self, key: str) -> None:
        self._keys_of[self._sticky.pop(key)] -= 1
