"""Attention page by page, so that nothing about a query depends on its batch.

A query attends to each page of its sequence separately; the partial results are merged by their log-sum-exp, in page
order. Every product then has one fixed inner shape (head_dim, or PAGE), whether a token is decoded alone, prefilled in
a chunk, or recomputed after a retraction, and its result is bit for bit the same. The products need 4 rows or more for
that (below 4 the libraries switch kernels), hence the padding of the query group in decode.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from miles.backends.embedded_engine.kv_cache import PAGE, SCRATCH, PagePool

TILE = 16  # query tokens that a prefill handles together; PAGE is a multiple, so a tile never straddles pages
MIN_ROWS = 4
_PAIR_ELEMENTS = 8 << 20  # query elements of one prefill chunk of (tile, page) pairs


def attend_pages(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Softmax attention of `rows` queries over one page each.

    Args: q [pairs, kv_heads, rows, dim], k and v [pairs, kv_heads, PAGE, dim], mask [pairs, 1, 1 or rows, PAGE] additive.
    Returns: output [pairs, rows, kv_heads, dim] and log-sum-exp [pairs, rows, kv_heads] fp32.
    """
    if q.device.type == "cpu":
        mask = mask.expand(-1, -1, q.shape[2], -1)
        out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, attn_mask=mask)
        return out.transpose(1, 2), lse.transpose(1, 2)
    scores = torch.matmul(q, k.transpose(2, 3)).float().mul_(q.shape[-1] ** -0.5).add_(mask)
    lse = torch.logsumexp(scores, dim=-1)
    out = torch.matmul(torch.exp(scores - lse[..., None]).to(v.dtype), v)
    return out.transpose(1, 2), lse.transpose(1, 2)


def merge_pages(out: torch.Tensor, lse: torch.Tensor, table: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    """Combine the partial results of each query over its pages.

    Args: out [pairs, rows, heads, dim], lse [pairs, rows, heads], table [queries * n] indices of pairs,
        bias [queries, n, 1, 1]: 0 for a page, -inf for padding. Padding comes last, so it adds exact zeros.
    Returns: [queries, rows, heads, dim].
    """
    queries, n = bias.shape[:2]
    rows, heads, dim = out.shape[1:]
    parts = out.index_select(0, table).view(queries, n, rows, heads, dim)
    if n == 1:
        return parts[:, 0]
    # Not torch.softmax: along a middle axis its exp rounds differently in the tail of a vector than inside it.
    lse = lse.index_select(0, table).view(queries, n, rows, heads) + bias
    weight = lse.sub_(lse.amax(dim=1, keepdim=True)).exp_()
    total = weight.sum(dim=1)
    return (parts * weight[..., None].to(parts.dtype)).sum(dim=1).div_(total[..., None].to(parts.dtype))


class MaskBank:
    """Additive masks inside one page, by the offset of the last visible token."""

    def __init__(self, device: torch.device, dtype: torch.dtype, group: int):
        visible = torch.arange(PAGE)[None, :] <= torch.arange(PAGE)[:, None]
        bank = torch.zeros(PAGE, PAGE).masked_fill_(~visible, float("-inf"))
        self.by_offset = bank.to(device=device, dtype=dtype if device.type == "cpu" else torch.float32)
        tiles = self.by_offset.view(PAGE // TILE, TILE, PAGE).repeat_interleave(group, dim=1)
        full = torch.zeros_like(tiles[:1])
        self.by_tile = torch.cat([tiles, full])  # [PAGE / TILE + 1, TILE * group, PAGE]; the last is "all visible"


@dataclass
class DecodePlan:
    """One token a sequence, over all pages in use, in place.

    pages: pages walked, from 0; owner [pages]: the row whose query meets the page; visible [pages]: last visible offset;
    table [rows, n] pages of each row; counts [rows] how many; slots [rows, kv_heads]: where the new keys go.
    """

    pool: PagePool
    bank: MaskBank
    pages: int
    owner: torch.Tensor
    visible: torch.Tensor
    table: torch.Tensor
    bias: torch.Tensor
    slots: torch.Tensor

    def __post_init__(self) -> None:
        self.mask = self.bank.by_offset.index_select(0, self.visible)[:, None, None, :]
        self.flat_table = self.table.reshape(-1)
        self._padded: torch.Tensor | None = None

    def attend(self, layer: int, q: torch.Tensor) -> torch.Tensor:
        """q [rows, heads, dim] -> [rows, heads * dim]."""
        assert self.pool.kv is not None
        keys, values = self.pool.kv[layer, 0, : self.pages], self.pool.kv[layer, 1, : self.pages]
        rows, heads, dim = q.shape
        kv_heads = keys.shape[1]
        group = heads // kv_heads
        q = q.view(rows, kv_heads, group, dim)
        if group < MIN_ROWS:
            if self._padded is None:
                self._padded = q.new_zeros(rows, kv_heads, MIN_ROWS, dim)
            self._padded[:, :, :group].copy_(q)
            q = self._padded
        out, lse = attend_pages(q.index_select(0, self.owner), keys, values, self.mask)
        merged = merge_pages(out[:, :group], lse[:, :group], self.flat_table, self.bias)
        return merged.transpose(1, 2).reshape(rows, heads * dim)


@dataclass
class TileChunk:
    """Some query tiles with the (tile, page) pairs that they need."""

    tiles: slice
    pair_tile: torch.Tensor
    pair_page: torch.Tensor
    mask: torch.Tensor
    table: torch.Tensor
    bias: torch.Tensor


@dataclass
class ExtendPlan:
    """New tokens of several sequences, in tiles aligned to their positions."""

    pool: PagePool
    group: int
    num_tiles: int
    tile_rows: torch.Tensor  # [tokens]: tile * TILE + position in the tile
    slots: torch.Tensor  # [tokens, kv_heads]
    chunks: list[TileChunk]

    def attend(self, layer: int, q: torch.Tensor) -> torch.Tensor:
        """q [tokens, heads, dim] -> [tokens, heads * dim]."""
        assert self.pool.kv is not None
        keys, values = self.pool.kv[layer, 0], self.pool.kv[layer, 1]
        tokens, heads, dim = q.shape
        kv_heads, group = heads // self.group, self.group
        tiles = q.new_zeros(self.num_tiles * TILE, heads * dim)
        tiles.index_copy_(0, self.tile_rows, q.reshape(tokens, heads * dim))
        tiles = tiles.view(self.num_tiles, TILE, kv_heads, group, dim).permute(0, 2, 1, 3, 4)
        tiles = tiles.reshape(self.num_tiles, kv_heads, TILE * group, dim)
        outs = []
        for chunk in self.chunks:
            k, v = keys.index_select(0, chunk.pair_page), values.index_select(0, chunk.pair_page)
            out, lse = attend_pages(tiles[chunk.tiles].index_select(0, chunk.pair_tile), k, v, chunk.mask)
            outs.append(merge_pages(out, lse, chunk.table, chunk.bias))
        out = outs[0] if len(outs) == 1 else torch.cat(outs)  # [tiles, TILE * group, kv_heads, dim]
        out = out.view(self.num_tiles, TILE, group, kv_heads, dim).transpose(2, 3)
        return out.reshape(self.num_tiles * TILE, heads * dim).index_select(0, self.tile_rows)


@dataclass
class Span:
    """Positions [start, end) of one sequence to compute, and its pages."""

    start: int
    end: int
    pages: list[int]


def slot_rows(pages: np.ndarray, offsets: np.ndarray, kv_heads: int) -> np.ndarray:
    """Row of each (token, head) in a layer's keys seen as [pages * kv_heads * PAGE, head_dim]: [tokens, kv_heads]."""
    return (pages[:, None] * kv_heads + np.arange(kv_heads)) * PAGE + offsets[:, None]


def padded_count(n: int) -> int:
    """Page-table width for `n` pages: the next power of two, so that few shapes occur."""
    return 1 << (n - 1).bit_length() if n > 1 else 1


def table_bias(counts: np.ndarray, width: int) -> np.ndarray:
    bias = np.zeros((len(counts), width), dtype=np.float32)
    bias[np.arange(width) >= counts[:, None]] = -np.inf
    return bias[:, :, None, None]


def build_extend_plan(pool: PagePool, bank: MaskBank, spans: list[Span], padding: int) -> ExtendPlan:
    """Plan the prefill of `spans`, followed by `padding` rows that write to the scratch page."""
    config, device = pool.config, pool.device
    rows, pages, offsets = [], [], []
    tiles: list[tuple[int, list[int]]] = []  # (index of the tile, pages it sees)
    spans = [*spans, Span(0, padding, [SCRATCH] * (padding // PAGE + 1))] if padding else spans
    for span in spans:
        positions = np.arange(span.start, span.end)
        first = span.start // TILE
        rows.append((len(tiles) + positions // TILE - first) * TILE + positions % TILE)
        pages.append(np.asarray(span.pages)[positions // PAGE])
        offsets.append(positions % PAGE)
        tiles += [(t, span.pages[: t * TILE // PAGE + 1]) for t in range(first, (span.end - 1) // TILE + 1)]
    slots = slot_rows(np.concatenate(pages), np.concatenate(offsets), config.num_kv_heads)
    return ExtendPlan(
        pool=pool,
        group=config.group_size,
        num_tiles=len(tiles),
        tile_rows=torch.from_numpy(np.concatenate(rows)).to(device),
        slots=torch.from_numpy(slots).to(device),
        chunks=_chunks(bank, tiles, config.num_heads * config.head_dim * TILE, device),
    )


def _chunks(
    bank: MaskBank, tiles: list[tuple[int, list[int]]], tile_elements: int, device: torch.device
) -> list[TileChunk]:
    limit = max(1, _PAIR_ELEMENTS // tile_elements)
    chunks, start = [], 0
    while start < len(tiles):
        end, pairs = start, 0
        while end < len(tiles) and (end == start or pairs + len(tiles[end][1]) <= limit):
            pairs += len(tiles[end][1])
            end += 1
        chunks.append(_chunk(bank, tiles[start:end], slice(start, end), device))
        start = end
    return chunks


def _chunk(bank: MaskBank, tiles: list[tuple[int, list[int]]], where: slice, device: torch.device) -> TileChunk:
    counts = np.array([len(pages) for _, pages in tiles])
    width, full = padded_count(int(counts.max())), PAGE // TILE
    starts = np.cumsum(counts) - counts
    table = np.zeros((len(tiles), width), dtype=np.int64)
    valid = np.arange(width) < counts[:, None]
    table[valid] = np.arange(counts.sum())
    kinds = np.full(counts.sum(), full)
    kinds[starts + counts - 1] = [t % full for t, _ in tiles]  # only the last page of a tile needs a causal mask
    pair_page = np.concatenate([np.asarray(pages) for _, pages in tiles])

    def put(array: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(array).to(device)

    return TileChunk(
        tiles=where,
        pair_tile=put(np.repeat(np.arange(len(tiles)), counts)),
        pair_page=put(pair_page),
        mask=bank.by_tile.index_select(0, put(kinds))[:, None],
        table=put(table.reshape(-1)),
        bias=put(table_bias(counts, width)),
    )
