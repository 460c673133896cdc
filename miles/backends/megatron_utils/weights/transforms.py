"""How a Megatron tensor is made of Hugging Face tensors, for one rank of those that share it, and back.

Each kind reads from the whole tensors only what its rank holds, and joins what all ranks hold into the whole tensors
again. Both directions move values and compute nothing, so they are exact in every dtype.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

Shape = tuple[int, ...]


class Source(Protocol):
    """A tensor in a file, of which slices can be read."""

    @property
    def shape(self) -> Shape: ...

    def read(self, dim: int = 0, start: int = 0, end: int | None = None) -> Tensor:
        """Its part `start:end` along `dim`."""


@dataclass(frozen=True)
class Shard:
    """Part `rank` of `size` equal ones."""

    rank: int
    size: int


class LayoutError(ValueError):
    """A tensor that does not divide among the ranks that share it."""


def _share(length: int, size: int, what: str) -> int:
    if length % size:
        raise LayoutError(f"{what} of {length} does not divide among {size} ranks")
    return length // size


class Transform(ABC):
    """One kind of an `Entry`. `shapes` and `sources` are those of its Hugging Face tensors, in the entry's order."""

    @abstractmethod
    def shape(self, shapes: Sequence[Shape], shard: Shard) -> Shape:
        """Of the rank's tensor. Raises: LayoutError."""

    @abstractmethod
    def read(self, sources: Sequence[Source], shard: Shard) -> Tensor:
        """The rank's tensor."""

    @abstractmethod
    def join(self, shards: Sequence[Tensor]) -> list[Tensor]:
        """The whole Hugging Face tensors, of every rank's tensor in rank order."""


class Whole(Transform):
    """Every rank holds all of it."""

    def shape(self, shapes: Sequence[Shape], shard: Shard) -> Shape:
        return shapes[0]

    def read(self, sources: Sequence[Source], shard: Shard) -> Tensor:
        return sources[0].read()

    def join(self, shards: Sequence[Tensor]) -> list[Tensor]:
        return [shards[0]]


class Split(Transform):
    """Each rank holds equal parts along a dimension: output rows (0) or input columns (1)."""

    def __init__(self, dim: int) -> None:
        self.dim = dim

    def shape(self, shapes: Sequence[Shape], shard: Shard) -> Shape:
        shape = list(shapes[0])
        shape[self.dim] = _share(shape[self.dim], shard.size, f"dimension {self.dim}")
        return tuple(shape)

    def read(self, sources: Sequence[Source], shard: Shard) -> Tensor:
        share = sources[0].shape[self.dim] // shard.size
        return sources[0].read(self.dim, shard.rank * share, (shard.rank + 1) * share)

    def join(self, shards: Sequence[Tensor]) -> list[Tensor]:
        return [shards[0] if len(shards) == 1 else torch.cat(list(shards), self.dim)]


class Vocabulary(Transform):
    """Rows of tokens, padded with zeros to what divides among the ranks; the padding is not part of the model."""

    def __init__(self, tokens: int, padded: int) -> None:
        self.tokens, self.padded = tokens, padded

    def shape(self, shapes: Sequence[Shape], shard: Shard) -> Shape:
        if shapes[0][0] != self.tokens:
            raise LayoutError(f"{shapes[0][0]} rows for a vocabulary of {self.tokens}")
        return (_share(self.padded, shard.size, "padded vocabulary"), *shapes[0][1:])

    def read(self, sources: Sequence[Source], shard: Shard) -> Tensor:
        share = self.padded // shard.size
        start = min(shard.rank * share, self.tokens)
        rows = sources[0].read(0, start, min(start + share, self.tokens))
        missing = share - rows.shape[0]
        return rows if missing == 0 else torch.cat([rows, rows.new_zeros(missing, *rows.shape[1:])])

    def join(self, shards: Sequence[Tensor]) -> list[Tensor]:
        return [torch.cat(list(shards))[: self.tokens] if self.padded > self.tokens or len(shards) > 1 else shards[0]]


class GateUp(Transform):
    """Gate and up projection: each rank has its rows of the gate above its rows of the up projection."""

    def shape(self, shapes: Sequence[Shape], shard: Shard) -> Shape:
        return (2 * _share(shapes[0][0], shard.size, "the width of the MLP"), *shapes[0][1:])

    def read(self, sources: Sequence[Source], shard: Shard) -> Tensor:
        share = sources[0].shape[0] // shard.size
        return torch.cat([s.read(0, shard.rank * share, (shard.rank + 1) * share) for s in sources])

    def join(self, shards: Sequence[Tensor]) -> list[Tensor]:
        halves = [shard.chunk(2) for shard in shards]
        return [_joined([half[i] for half in halves]) for i in (0, 1)]


class QueryKeyValue(Transform):
    """Query, key and value projection: for each key-value head the rows of its queries, of its key, of its value.

    Ranks share this matrix evenly, also where they are more than there are key-value heads: a rank then holds a part of
    one head's rows.
    """

    def __init__(self, groups: int, query_heads: int, head_dim: int) -> None:
        self.groups = groups
        self.rows = (query_heads // groups * head_dim, head_dim, head_dim)  # of one group

    def shape(self, shapes: Sequence[Shape], shard: Shard) -> Shape:
        wanted = [self.groups * rows for rows in self.rows]
        if [s[0] for s in shapes] != wanted:
            raise LayoutError(f"{[s[0] for s in shapes]} rows of query, key and value instead of {wanted}")
        return (_share(self.groups * sum(self.rows), shard.size, "query, key and value"), *shapes[0][1:])

    def read(self, sources: Sequence[Source], shard: Shard) -> Tensor:
        if shard.size <= self.groups:
            count = _share(self.groups, shard.size, "the number of key-value heads")
            return self._groups(sources, shard.rank * count, count)
        parts = _share(shard.size, self.groups, "the number of ranks")
        return self._groups(sources, shard.rank // parts, 1).chunk(parts)[shard.rank % parts]

    def _groups(self, sources: Sequence[Source], first: int, count: int) -> Tensor:
        parts = [
            source.read(0, first * rows, (first + count) * rows).unflatten(0, (count, rows))
            for source, rows in zip(sources, self.rows, strict=True)
        ]
        return torch.cat(parts, 1).flatten(0, 1)

    def join(self, shards: Sequence[Tensor]) -> list[Tensor]:
        whole = _joined(shards).unflatten(0, (self.groups, sum(self.rows)))
        return [part.flatten(0, 1) for part in whole.split(self.rows, 1)]


def _joined(parts: Sequence[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(list(parts))
