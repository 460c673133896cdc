"""The Megatron trainer. Importing any part of it stands in for triton where that is missing."""

from __future__ import annotations

import importlib.util
import sys
import types
from typing import Any

_PAGED_STASH = "megatron.core.transformer.moe.ops.paged_stash"


def _stand_in_for_triton() -> None:
    """From 0.17 on one module of megatron-core imports triton without need, and nothing that trains would import without it.

    So this comes before the first import of megatron-core.
    """
    if importlib.util.find_spec("triton") is None and _PAGED_STASH not in sys.modules:
        module: Any = types.ModuleType(_PAGED_STASH)
        module.GLOBAL_BLOCK_SIZE = 1024
        module.paged_stash_copy_kernel = module.paged_stash_pop_kernel = None
        sys.modules[_PAGED_STASH] = module


_stand_in_for_triton()
