"""How a CPU process treats the large blocks that tensors are.

By default glibc's malloc maps each, has it faulted in page by page and unmaps it again, every step anew: up to a third of
a training step. Where there is no glibc, the functions about malloc do nothing.
"""

from __future__ import annotations

import ctypes
import mmap

import torch

# The environment of a process whose malloc is to reuse freed blocks of any size, and to return none to the system but by
# `return_freed_memory`. By `mallopt`, a thread that has an arena of its own already would still map what does not fit there.
KEEP_FREED_MEMORY = {
    "MALLOC_ARENA_MAX": "1",
    "MALLOC_MMAP_MAX_": "0",
    "MALLOC_TRIM_THRESHOLD_": str(1 << 62),
    "MALLOC_TOP_PAD_": str(64 << 20),
}


def return_freed_memory() -> None:
    """Give what was freed back to the system."""
    malloc_trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if malloc_trim is not None:
        malloc_trim(0)


def lazy_zeros(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Zeros of which only the pages that are used cost memory; freed, they go back to the system whatever malloc does."""
    nbytes = torch.Size(shape).numel() * dtype.itemsize
    if nbytes == 0:
        return torch.zeros(shape, dtype=dtype)
    return torch.frombuffer(mmap.mmap(-1, nbytes), dtype=dtype).view(shape)
