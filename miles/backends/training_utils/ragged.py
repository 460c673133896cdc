"""Columns of many small arrays, as one array each while they travel.

The object store keeps every array of its own as a buffer of its own, and a thousand of those cost more than their bytes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np


@dataclass(frozen=True)
class Ragged:
    """1-D arrays of one dtype, end to end."""

    flat: np.ndarray
    lengths: list[int]


def pack(columns: dict[str, Any]) -> dict[str, Any]:
    """The columns with every list of 1-D arrays of one dtype as a `Ragged`; the others are the same objects."""
    return {name: _join(value) if _is_ragged(value) else value for name, value in columns.items()}


def unpack(columns: dict[str, Any]) -> dict[str, Any]:
    """Inverse of `pack`; the arrays are views of the joined one."""
    return {name: _cut(value) if isinstance(value, Ragged) else value for name, value in columns.items()}


def _is_ragged(value: Any) -> bool:
    if not isinstance(value, list) or not value or not isinstance(value[0], np.ndarray):
        return False
    dtype = value[0].dtype
    return all(isinstance(a, np.ndarray) and a.ndim == 1 and a.dtype == dtype for a in value) and dtype.kind != "O"


def _join(arrays: list[np.ndarray]) -> Ragged:
    return Ragged(np.concatenate(arrays), [len(a) for a in arrays])


def _cut(ragged: Ragged) -> list[np.ndarray]:
    return np.split(ragged.flat, np.cumsum(ragged.lengths[:-1]))
