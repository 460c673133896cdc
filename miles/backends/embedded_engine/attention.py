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

TILE = 32  # query tokens that a prefill handles together; PAGE is a multiple, so a tile never straddles pages
MIN_ROWS = 4
_PAIR_ELEMENTS = 8 << 20  # query elements of one prefill chunk of (tile, page) pairs


@dataclass
class Partial:
    """Attention of queries over one page each.

    out [pairs, kv_heads, >= rows, dim]; highest score, and sum of exp(score - highest), [pairs, kv_heads, rows] fp32.
    """

    out: torch.Tensor
    highest: torch.Tensor
    total: torch.Tensor


class Workspace:
    """Buffers of `attend_pages`, kept from layer to layer and step to step; the weights' padding rows stay zero."""

    def __init__(self) -> None:
        self._buffers: dict[str, torch.Tensor] = {}

    def take(self, name: str, shape: tuple[int, ...], like: torch.Tensor) -> torch.Tensor:
        """A buffer of `shape`, zero at first; its contents are those that the last user of its rows left."""
        buffer = self._buffers.get(name)
        if buffer is None or buffer.shape[1:] != shape[1:] or len(buffer) < shape[0] or buffer.dtype != like.dtype:
            buffer = like.new_zeros(shape[0] + shape[0] // 4, *shape[1:])
            self._buffers[name] = buffer
        return buffer[: shape[0]]


def attend_pages(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor, rows: int, space: Workspace
) -> Partial:
    """Attend from the first `rows` of the scaled queries; rows beyond are padding.

    Args: q [pairs, kv_heads, >= rows, dim], k and v [pairs, kv_heads, PAGE, dim], mask [pairs, 1, 1 or rows, PAGE] additive.
    Returns: views of `space`, valid until its next use.
    """
    pairs, heads, padded, dim = q.shape
    shape = (pairs, heads, padded, PAGE)
    scores = space.take("scores", shape, q)
    torch.bmm(q.view(-1, padded, dim), k.view(-1, PAGE, dim).transpose(1, 2), out=scores.view(-1, padded, PAGE))
    scores = torch.add(scores[:, :, :rows], mask)
    # One softmax kernel, and its largest weight exp(0) / total: torch.exp is ten times slower where scores are masked.
    probs = torch.softmax(scores, dim=-1)
    weight = space.take("weight", shape, v)
    weight[:, :, :rows].copy_(probs)
    out = space.take("out", (pairs, heads, padded, dim), v)
    torch.bmm(weight.view(-1, padded, PAGE), v.view(-1, PAGE, dim), out=out.view(-1, padded, dim))
    return Partial(out, scores.amax(dim=-1), probs.amax(dim=-1).reciprocal_())


@dataclass
class PageTable:
    """The pages of each query, in order, padded to one width n.

    pairs [queries * n] indices of (query, page) pairs; bias [queries, n, 1, 1]: 0 for a page, -inf for padding;
    bags [queries * kv_heads * rows * n] rows of `Partial.out` seen as [-1, dim], and where each bag of n begins.
    """

    pairs: torch.Tensor
    bias: torch.Tensor
    bags: torch.Tensor
    starts: torch.Tensor


def page_table(pages: np.ndarray, counts: np.ndarray, heads: int, rows: int, device: torch.device) -> PageTable:
    """From pages [queries, n], of which `counts` [queries] are real, for `rows` query rows of each of `heads`."""
    queries, width = pages.shape
    padded = max(rows, MIN_ROWS)
    bias = np.zeros((queries, width), dtype=np.float32)
    bias[np.arange(width) >= counts[:, None]] = -np.inf
    bags = (pages[:, None, None, :] * heads + np.arange(heads)[:, None, None]) * padded + np.arange(rows)[:, None]
    starts = np.arange(0, bags.size, width)
    pairs, bags = (np.ascontiguousarray(array).reshape(-1) for array in (pages, bags))
    return PageTable(*(torch.from_numpy(array).to(device) for array in (pairs, bias[:, :, None, None], bags, starts)))


def merge_pages(part: Partial, table: PageTable) -> torch.Tensor:
    """Combine each query's partial results over its pages: [queries, kv_heads, rows, dim].

    Padding comes last and weighs 0, so it adds exact zeros.
    """
    queries, n = table.bias.shape[:2]
    _, heads, _, dim = part.out.shape
    rows = part.total.shape[2]
    # Not torch.softmax: along a middle axis its exp rounds differently in the tail of a vector than inside it.
    highest = (
        part.highest.view(-1, heads * rows).index_select(0, table.pairs).view(queries, n, heads, rows) + table.bias
    )
    weight = highest.sub_(highest.amax(dim=1, keepdim=True)).exp_()
    weight.mul_(part.total.view(-1, heads * rows).index_select(0, table.pairs).view_as(weight))
    weight.div_(weight.sum(dim=1, keepdim=True))
    weight = weight.permute(0, 2, 3, 1).reshape(-1).to(part.out.dtype)
    # A weighted sum of gathered rows in one kernel, in the order of the pages.
    merged, *_ = torch.ops.aten._embedding_bag_forward_only(
        part.out.view(-1, dim), table.bags, table.starts, False, 0, False, weight
    )
    return merged.view(queries, heads, rows, dim)


class MaskBank:
    """Additive masks inside one page, by the offset of the last visible token."""

    def __init__(self, device: torch.device, group: int):
        visible = torch.arange(PAGE)[None, :] <= torch.arange(PAGE)[:, None]
        bank = torch.zeros(PAGE, PAGE).masked_fill_(~visible, float("-inf"))
        self.by_offset = bank.to(device=device)
        tiles = self.by_offset.view(PAGE // TILE, TILE, PAGE).repeat_interleave(group, dim=1)
        full = torch.zeros_like(tiles[:1])
        self.by_tile = torch.cat([tiles, full])  # [PAGE / TILE + 1, TILE * group, PAGE]; the last is "all visible"


@dataclass
class DecodePlan:
    """One token a sequence, over all pages in use, in place.

    pages: pages walked, from 0; owner [pages]: the row whose query meets the page; visible [pages]: last visible offset;
    table: the pages of each row; slots: see `slot_rows`.
    """

    pool: PagePool
    bank: MaskBank
    pages: int
    owner: torch.Tensor
    visible: torch.Tensor
    table: PageTable
    slots: torch.Tensor
    space: Workspace

    def __post_init__(self) -> None:
        self.mask = self.bank.by_offset.index_select(0, self.visible)[:, None, None, :]
        self._queries: torch.Tensor | None = None

    def attend(self, layer: int, q: torch.Tensor) -> torch.Tensor:
        """q [rows, heads, dim] -> [rows, heads * dim]."""
        keys, values = self.pool.keys[layer][: self.pages], self.pool.values[layer][: self.pages]
        rows, heads, dim = q.shape
        kv_heads = keys.shape[1]
        group = heads // kv_heads
        if self._queries is None:
            self._queries = q.new_zeros(rows, kv_heads, max(group, MIN_ROWS), dim)
        torch.mul(q.unflatten(1, (kv_heads, group)), dim**-0.5, out=self._queries[:, :, :group])
        queries = self._queries.index_select(0, self.owner)
        part = attend_pages(queries, keys, values, self.mask, group, self.space)
        return merge_pages(part, self.table).view(rows, heads * dim)


@dataclass
class TileChunk:
    """Some query tiles with the (tile, page) pairs that they need."""

    tiles: slice
    pair_tile: torch.Tensor
    pair_page: torch.Tensor
    mask: torch.Tensor
    table: PageTable


@dataclass
class ExtendPlan:
    """New tokens of several sequences, in tiles aligned to their positions."""

    pool: PagePool
    group: int
    num_tiles: int
    tile_rows: torch.Tensor  # [tokens]: tile * TILE + position in the tile
    slots: torch.Tensor  # see `slot_rows`
    chunks: list[TileChunk]
    space: Workspace

    def attend(self, layer: int, q: torch.Tensor) -> torch.Tensor:
        """q [tokens, heads, dim] -> [tokens, heads * dim]."""
        keys, values = self.pool.keys[layer], self.pool.values[layer]
        tokens, heads, dim = q.shape
        kv_heads, group = heads // self.group, self.group
        tiles = q.new_zeros(self.num_tiles * TILE, heads * dim)
        tiles.index_copy_(0, self.tile_rows, (q * dim**-0.5).view(tokens, heads * dim))
        tiles = tiles.view(self.num_tiles, TILE, kv_heads, group, dim).permute(0, 2, 1, 3, 4)
        tiles = tiles.reshape(self.num_tiles, kv_heads, TILE * group, dim)
        outs = []
        for chunk in self.chunks:
            k, v = keys.index_select(0, chunk.pair_page), values.index_select(0, chunk.pair_page)
            queries = tiles[chunk.tiles].index_select(0, chunk.pair_tile)
            part = attend_pages(queries, k, v, chunk.mask, TILE * group, self.space)
            outs.append(merge_pages(part, chunk.table))
        out = outs[0] if len(outs) == 1 else torch.cat(outs)  # [tiles, kv_heads, TILE * group, dim]
        out = out.reshape(self.num_tiles, kv_heads, TILE, group, dim).transpose(1, 2)
        return out.reshape(self.num_tiles * TILE, heads * dim).index_select(0, self.tile_rows)


@dataclass
class Span:
    """Positions [start, end) of one sequence to compute, and its pages."""

    start: int
    end: int
    pages: list[int]


def slot_rows(pool: PagePool, pages: np.ndarray, offsets: np.ndarray) -> np.ndarray:
    """Where the keys, then the values, of each token go: rows of a layer's cache seen as [-1, head_dim].

    Args: pages and offsets [tokens]. Returns: [tokens, 2 * kv_heads].
    """
    heads = pool.config.num_kv_heads
    first = (pages[:, None] * heads + np.arange(heads)) * PAGE + offsets[:, None]
    return np.concatenate([first, first + pool.pages * heads * PAGE], axis=1)


def padded_count(n: int) -> int:
    """Page-table width for `n` pages: the next power of two, so that few shapes occur."""
    return 1 << (n - 1).bit_length() if n > 1 else 1


def build_extend_plan(pool: PagePool, bank: MaskBank, spans: list[Span], padding: int, space: Workspace) -> ExtendPlan:
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
    slots = slot_rows(pool, np.concatenate(pages), np.concatenate(offsets))
    return ExtendPlan(
        pool=pool,
        group=config.group_size,
        num_tiles=len(tiles),
        tile_rows=torch.from_numpy(np.concatenate(rows)).to(device),
        slots=torch.from_numpy(slots).to(device),
        chunks=_chunks(pool, bank, tiles),
        space=space,
    )


def _chunks(pool: PagePool, bank: MaskBank, tiles: list[tuple[int, list[int]]]) -> list[TileChunk]:
    limit = max(1, _PAIR_ELEMENTS // (pool.config.num_heads * pool.config.head_dim * TILE))
    chunks, start = [], 0
    while start < len(tiles):
        end, pairs = start, 0
        while end < len(tiles) and (end == start or pairs + len(tiles[end][1]) <= limit):
            pairs += len(tiles[end][1])
            end += 1
        chunks.append(_chunk(pool, bank, tiles[start:end], slice(start, end)))
        start = end
    return chunks


def _chunk(pool: PagePool, bank: MaskBank, tiles: list[tuple[int, list[int]]], where: slice) -> TileChunk:
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
        return torch.from_numpy(array).to(pool.device)

    config = pool.config
    return TileChunk(
        tiles=where,
        pair_tile=put(np.repeat(np.arange(len(tiles)), counts)),
        pair_page=put(pair_page),
        mask=bank.by_tile.index_select(0, put(kinds))[:, None],
        table=page_table(table, counts, config.num_kv_heads, TILE * config.group_size, pool.device),
    )
