"""Columns of many small arrays, as one array each while they travel.

The object store keeps every array of its own as a buffer of its own, and a thousand of those cost more than their bytes.
A joined column is one buffer there, and what arrives are views of it: nothing is copied, and what is not looked at is not read.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np


@dataclass(frozen=True)
class Ragged:
    """Arrays that differ in their first dimension only, end to end; length None where an entry is None."""

    flat: np.ndarray
    lengths: list[int | None]


def pack(columns: dict[str, Any]) -> dict[str, Any]:
    """The columns with every list of like arrays (and None) as a `Ragged`; the others are the same objects."""
    return {name: _join(value) if _is_ragged(value) else value for name, value in columns.items()}


def unpack(columns: dict[str, Any]) -> dict[str, Any]:
    """Inverse of `pack`; the arrays are views of the joined one."""
    return {name: list(_cut(value)) if isinstance(value, Ragged) else value for name, value in columns.items()}


def _is_ragged(value: Any) -> bool:
    if not isinstance(value, list):
        return False
    first = next((a for a in value if a is not None), None)
    if not isinstance(first, np.ndarray) or first.ndim == 0 or first.dtype.kind == "O":
        return False
    like = (first.dtype, first.shape[1:])
    return all(a is None or (isinstance(a, np.ndarray) and a.ndim and (a.dtype, a.shape[1:]) == like) for a in value)


def _join(arrays: list[np.ndarray | None]) -> Ragged:
    return Ragged(np.concatenate([a for a in arrays if a is not None]), [None if a is None else len(a) for a in arrays])


def _cut(ragged: Ragged) -> Iterator[np.ndarray | None]:
    start = 0
    for length in ragged.lengths:
        yield None if length is None else ragged.flat[start : start + length]
        start += length or 0
