"""What this host can compute on, found out without importing torch where no GPU can be."""

from __future__ import annotations

import functools
import importlib.util
import shutil
from pathlib import Path


@functools.cache
def has_gpu() -> bool:
    """Whether torch here can use a GPU."""
    if not (shutil.which("nvidia-smi") or Path("/dev/nvidiactl").exists() or Path("/dev/kfd").exists()):
        return False
    import torch

    return torch.cuda.is_available()


def has_package(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:  # of a package inside one that is not there
        return False
