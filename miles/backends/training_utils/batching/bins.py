"""Partition sequences into bins: first-fit-decreasing under a cap, and Karmarkar-Karp for balance.

Bins are lists of indices into the given sizes. Everything here is deterministic: ties go to the lower index.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from math import ceil

Bin = list[int]


def first_fit_decreasing(sizes: Sequence[int], cap: int) -> list[Bin]:
    """Pack `sizes` into bins of at most `cap`, longest first, each into the first bin with room.

    A size above `cap` gets a bin of its own.
    """
    bins: list[Bin] = []
    room: list[int] = []
    for index in sorted(range(len(sizes)), key=lambda i: (-sizes[i], i)):
        size = sizes[index]
        for slot, free in enumerate(room):
            if size <= free:
                bins[slot].append(index)
                room[slot] -= size
                break
        else:
            bins.append([index])
            room.append(cap - size)
    return bins


def karmarkar_karp(weights: Sequence[float], k: int, *, equal_count: bool = False) -> list[Bin]:
    """Partition indices into `k` bins of near-equal total weight by the largest differencing method.

    With `equal_count` every bin gets `len(weights) / k` indices, which must divide.
    Bins come ordered by total weight, heaviest first; without `equal_count` some may be empty.
    """
    order = sorted(range(len(weights)), key=lambda i: (-weights[i], i))
    if equal_count:
        if len(order) % k:
            raise ValueError(f"{len(order)} items do not divide into {k} bins of equal count")
        starts = [order[i : i + k] for i in range(0, len(order), k)]
    else:
        starts = [[index] for index in order]
    heap: list[tuple[float, int, list[tuple[float, Bin]]]] = []
    for serial, start in enumerate(starts):
        parts = [(float(weights[i]), [i]) for i in start] + [(0.0, [])] * (k - len(start))
        heap.append((parts[-1][0] - parts[0][0], serial, parts))
    heapq.heapify(heap)
    serial = len(heap)
    while len(heap) > 1:
        _, _, a = heapq.heappop(heap)
        _, _, b = heapq.heappop(heap)
        # The heaviest part of one meets the lightest of the other.
        merged = [(wa + wb, ia + ib) for (wa, ia), (wb, ib) in zip(a, reversed(b), strict=True)]
        merged.sort(key=lambda part: (-part[0], part[1]))
        heapq.heappush(heap, (merged[-1][0] - merged[0][0], serial, merged))
        serial += 1
    return [part for _, part in heap[0][2]] if heap else [[] for _ in range(k)]


def balanced_bins_under_cap(sizes: Sequence[int], weights: Sequence[float], cap: int) -> list[Bin]:
    """Bins of near-equal total weight that still keep `cap` on total size, and never more bins than first-fit needs.

    The smallest bin count whose Karmarkar-Karp partition fits is taken; where none fits, first-fit-decreasing is.
    """
    packed = first_fit_decreasing(sizes, cap)
    fewest = max(1, ceil(sum(min(size, cap) for size in sizes) / cap))
    for k in range(fewest, len(packed) + 1):
        bins = [b for b in karmarkar_karp(weights, k) if b]
        if all(len(b) == 1 or sum(sizes[i] for i in b) <= cap for b in bins):
            return bins
    return packed


def split_to_multiple(bins: list[Bin], weights: Sequence[float], multiple: int) -> list[Bin]:
    """Split the heaviest bins of two or more indices in halves until the count is a multiple of `multiple`.

    Ends short of the multiple when only singletons are left: the caller then adds fillers.
    """
    bins = [list(b) for b in bins]
    while len(bins) % multiple:
        splittable = [slot for slot, b in enumerate(bins) if len(b) > 1]
        if not splittable:
            break
        heaviest = max(splittable, key=lambda slot: (sum(weights[i] for i in bins[slot]), -slot))
        left, right = _halves(bins[heaviest], weights)
        bins[heaviest] = left
        bins.append(right)
    return bins


def _halves(indices: Bin, weights: Sequence[float]) -> tuple[Bin, Bin]:
    """Two non-empty halves, longest processing time first."""
    left: Bin = []
    right: Bin = []
    weight_left = weight_right = 0.0
    for index in sorted(indices, key=lambda i: (-weights[i], i)):
        if weight_left <= weight_right and not (left and not right):
            left.append(index)
            weight_left += weights[index]
        else:
            right.append(index)
            weight_right += weights[index]
    return left, right
