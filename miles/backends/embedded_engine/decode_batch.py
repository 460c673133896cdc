"""The running requests as arrays, kept from step to step so that a decode step touches no request object."""

from __future__ import annotations

import numpy as np
import torch

from miles.backends.embedded_engine.attention import (
    DecodePlan,
    MaskBank,
    PageTable,
    Workspace,
    padded_count,
    page_table,
    slot_rows,
)
from miles.backends.embedded_engine.kv_cache import PAGE, PagePool
from miles.backends.embedded_engine.linear import ROW_STEP
from miles.backends.embedded_engine.request import Request


class DecodeBatch:
    """Rows of `requests`; row i decodes token `ids[i]` at `positions[i]`."""

    def __init__(self, pool: PagePool, bank: MaskBank, max_rows: int, max_pages: int):
        rows = -(-max_rows // ROW_STEP) * ROW_STEP
        self.pool, self.bank = pool, bank
        self.requests: list[Request] = []
        self.space = Workspace()
        self.ids = np.zeros(rows, dtype=np.int64)
        self.positions = np.zeros(rows, dtype=np.int64)
        self.counts = np.ones(rows, dtype=np.int64)
        self.table = np.zeros((rows, padded_count(max_pages)), dtype=np.int64)
        self.owner = np.zeros(pool.pages, dtype=np.int64)
        self.visible = np.full(pool.pages, PAGE - 1, dtype=np.int64)
        self._walk: tuple[int, torch.Tensor, PageTable] | None = None  # what changes only with the pages

    def set(self, requests: list[Request]) -> None:
        """Take a new list of rows."""
        self.requests, self._walk = requests, None
        for array, value in ((self.ids, 0), (self.positions, 0), (self.counts, 1), (self.table, 0), (self.owner, 0)):
            array[:] = value
        self.visible[:] = PAGE - 1
        for row, request in enumerate(requests):
            pages = request.pages
            self.ids[row] = request.output_ids[-1]
            self.positions[row] = request.length - 1
            self.counts[row] = len(pages)
            self.table[row, : len(pages)] = pages
            self.owner[pages] = row

    def rows_without_room(self) -> list[int]:
        """Rows whose next token needs a new page."""
        n = len(self.requests)
        return np.nonzero(self.positions[:n] >= self.counts[:n] * PAGE)[0].tolist()

    def give_page(self, row: int, page: int) -> None:
        self.requests[row].pages.append(page)
        self.table[row, self.counts[row]] = page
        self.counts[row] += 1
        self.owner[page], self.visible[page] = row, PAGE - 1
        self._walk = None

    def plan(self) -> tuple[torch.Tensor, torch.Tensor, DecodePlan]:
        """Token ids [rows], positions [rows] and the attention plan of one step, padding rows included."""
        live = len(self.requests)
        n = -(-live // ROW_STEP) * ROW_STEP
        positions, device = self.positions[:n], self.pool.device
        page, offset = self.table[np.arange(n), positions // PAGE], positions % PAGE
        self.visible[page[:live]] = offset[:live]
        if self._walk is None:
            self._walk = self._build_walk(n)
        pages, owner, table = self._walk

        def put(array: np.ndarray) -> torch.Tensor:
            return torch.from_numpy(array).to(device)

        plan = DecodePlan(
            pool=self.pool,
            bank=self.bank,
            pages=pages,
            owner=owner,
            visible=put(self.visible[:pages]),
            table=table,
            slots=put(slot_rows(self.pool, page, offset)),
            space=self.space,
        )
        return put(self.ids[:n]), put(positions), plan

    def _build_walk(self, n: int) -> tuple[int, torch.Tensor, PageTable]:
        """Pages to walk, the row of each, and the pages of each of `n` rows."""
        config, device = self.pool.config, self.pool.device
        width = padded_count(int(self.counts[:n].max()))
        pages = int(self.table[: len(self.requests)].max()) + 1
        table = page_table(self.table[:n, :width], self.counts[:n], config.num_kv_heads, config.group_size, device)
        return pages, torch.from_numpy(self.owner[:pages].copy()).to(device), table

    def advance(self, tokens: np.ndarray) -> None:
        """Each row's new token [rows] is decoded next."""
        n = len(self.requests)
        self.ids[:n] = tokens
        self.positions[:n] += 1
