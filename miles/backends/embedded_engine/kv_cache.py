"""Pages of keys and values.

One tensor holds every page of every layer. Running requests own pages alone, from the low end, so that a decode step can
walk the range in place; cached prefixes live at the high end and are copied into a request's own pages when reused.
"""

from __future__ import annotations

import heapq

import torch

from miles.backends.embedded_engine.model_config import ModelConfig
from miles.utils.memory import lazy_zeros

PAGE = 64  # tokens a page
SCRATCH = 0  # a page that nobody owns: padding rows write here, and empty page-table entries point here


def page_bytes(config: ModelConfig, dtype: torch.dtype) -> int:
    return config.num_layers * 2 * config.num_kv_heads * PAGE * config.head_dim * dtype.itemsize


def _zeros(shape: tuple[int, ...], device: torch.device, dtype: torch.dtype) -> torch.Tensor:
    """Zeros; on a CPU a large pool costs what is used of it."""
    return lazy_zeros(shape, dtype) if device.type == "cpu" else torch.zeros(shape, device=device, dtype=dtype)


class PagePool:
    """`kv` is [layers, 2, pages, kv_heads, PAGE, head_dim]; `keys` and `values` are its views, one a layer.

    `routes` (sparse models) is [pages, PAGE, layers, top_k]: the experts that each cached token went through.
    """

    def __init__(self, config: ModelConfig, pages: int, device: torch.device, dtype: torch.dtype):
        self.config, self.pages, self.device, self.dtype = config, pages, device, dtype
        self.kv: torch.Tensor | None = None
        self.allocate_storage()
        self._low = list(range(1, pages))
        self._high = [-page for page in range(pages - 1, 0, -1)]
        self._free = [False] + [True] * (pages - 1)
        self.num_free = pages - 1

    def allocate_storage(self) -> None:
        c = self.config
        shape = (c.num_layers, 2, self.pages, c.num_kv_heads, PAGE, c.head_dim)
        self.kv = _zeros(shape, self.device, self.dtype)
        self.keys = [self.kv[i, 0] for i in range(c.num_layers)]
        self.values = [self.kv[i, 1] for i in range(c.num_layers)]
        self.routes: torch.Tensor | None = None
        if c.moe is not None:
            self.routes = lazy_zeros((self.pages, PAGE, c.num_layers, c.moe.top_k), torch.int32)

    def free_storage(self) -> None:
        self.kv = self.routes = None
        self.keys, self.values = [], []

    def take_low(self) -> int | None:
        """A page for a running request, or None when all are in use."""
        return self._take(self._low, 1)

    def take_high(self) -> int | None:
        """A page for a cached prefix."""
        return self._take(self._high, -1)

    def _take(self, heap: list[int], sign: int) -> int | None:
        while heap:
            page = sign * heapq.heappop(heap)
            if self._free[page]:
                self._free[page] = False
                self.num_free -= 1
                return page
        return None

    def give_back(self, page: int) -> None:
        if self._free[page] or page == SCRATCH:
            raise RuntimeError(f"page {page} was freed twice")
        self._free[page] = True
        self.num_free += 1
        heapq.heappush(self._low, page)
        heapq.heappush(self._high, -page)

    def copy(self, source: list[int], target: list[int]) -> None:
        assert self.kv is not None
        self.kv[:, :, target] = self.kv[:, :, source]
        if self.routes is not None:
            self.routes[target] = self.routes[source]

    def scrub_free_pages(self) -> None:
        """Zero all pages that nobody owns. A masked NaN would still poison the weighted sum over a page."""
        assert self.kv is not None
        pages = [SCRATCH] + [p for p in range(1, self.pages) if self._free[p]]
        self.kv[:, :, pages] = 0
