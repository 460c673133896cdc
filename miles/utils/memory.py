"""How a CPU process treats the large blocks that tensors are.

By default glibc's malloc maps each, has it faulted in page by page and unmaps it again, every step anew: up to a third of
a training step. Where there is no glibc, the functions about malloc do nothing.
"""

from __future__ import annotations

import ctypes
import mmap

import torch

_M_TRIM_THRESHOLD, _M_TOP_PAD, _M_MMAP_MAX, _M_ARENA_MAX = -1, -2, -4, -8


def keep_freed_memory() -> None:
    """Let malloc reuse freed blocks of any size, and return none to the system but by `return_freed_memory`."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        for option, value in ((_M_MMAP_MAX, 0), (_M_TRIM_THRESHOLD, -1), (_M_TOP_PAD, 64 << 20), (_M_ARENA_MAX, 1)):
            mallopt(option, value)


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
