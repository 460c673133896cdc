"""Prefixes that were computed under the current weights, as a tree of pages."""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field

from miles.backends.embedded_engine.kv_cache import PAGE, PagePool

MIN_PARTIAL = 8  # copying a page for fewer shared tokens than this costs more than computing them


@dataclass(eq=False)
class Node:
    """One cached page holding `tokens` (at most PAGE) that follow the parent's. Only full pages have children."""

    tokens: tuple[int, ...]
    page: int
    parent: Node | None
    children: dict[int, list[Node]] = field(default_factory=dict)  # by first token


@dataclass
class Match:
    """`length` cached tokens, in `pages`; the last page may be shared only in part."""

    length: int
    pages: list[int]


class PrefixCache:
    """A tree a namespace. An entry is never valid across a change of weights: `clear` on every one.

    Least recently used leaves go first. A node is touched after its children, so the oldest node is always a leaf.
    """

    def __init__(self, pool: PagePool, enabled: bool = True):
        self.pool, self.enabled = pool, enabled
        self.roots: dict[str, Node] = {}
        self.recency: OrderedDict[Node, None] = OrderedDict()
        self._copies: dict[int, int] = {}  # cached page -> the page it will be copied from, see `commit`
        self._by_page: dict[int, Node] = {}
        self._lowest: list[int] = []  # a heap of cached pages, and of some that no longer are

    @property
    def num_pages(self) -> int:
        return len(self.recency)

    def match(self, namespace: str, tokens: Sequence[int], limit: int) -> Match:
        """The longest cached prefix of `tokens`, at most `limit` long. Its pages stay valid until the next eviction."""
        node, found = self.roots.get(namespace), Match(0, [])
        if node is None or not self.enabled:
            return found
        path: list[Node] = []
        while found.length < limit:
            best, shared = self._best_child(node, tokens[found.length : min(limit, found.length + PAGE)])
            if best is None or (shared < PAGE and shared < MIN_PARTIAL):
                break
            found.length += shared
            found.pages.append(best.page)
            path.append(best)
            if shared < PAGE:
                break
            node = best
        for visited in reversed(path):
            self.recency.move_to_end(visited)
        return found

    @staticmethod
    def _best_child(node: Node, chunk: Sequence[int]) -> tuple[Node | None, int]:
        best, shared = None, 0
        for child in node.children.get(chunk[0], ()) if chunk else ():
            n = common_prefix(child.tokens, chunk)
            if n > shared:
                best, shared = child, n
        return best, shared

    def insert(self, namespace: str, tokens: Sequence[int], pages: Sequence[int]) -> None:
        """Note what is not cached yet of a sequence's `pages` holding `tokens`; `commit` copies it."""
        if not self.enabled:
            return
        node = self.roots.setdefault(namespace, Node((), -1, None))
        path: list[Node] = []
        for i, start in enumerate(range(0, len(tokens), PAGE)):
            chunk = tuple(tokens[start : start + PAGE])
            child, shared = self._best_child(node, chunk)
            if child is None or shared < len(chunk):
                if child is not None and shared == len(child.tokens):
                    child.tokens = chunk  # a partial page that this one continues
                else:
                    if len(chunk) < MIN_PARTIAL:
                        break
                    page = self._new_page(path)
                    if page is None:
                        break
                    child = Node(chunk, page, node)
                    self._place(child, page)
                    node.children.setdefault(chunk[0], []).append(child)
                self._copies[child.page] = pages[i]
            self.recency[child] = None
            path.append(child)
            node = child
        for visited in reversed(path):
            self.recency.move_to_end(visited)

    def commit(self) -> None:
        """Copy all that was inserted, at once. Due before anything is matched, and before a page that was given back
        meanwhile is written again."""
        if self._copies:
            self.pool.copy(list(self._copies.values()), list(self._copies))
            self._copies.clear()

    def _new_page(self, path: list[Node]) -> int | None:
        for node in reversed(path):
            self.recency.move_to_end(node)  # never evict the prefix that is being extended
        page = self.pool.take_high()
        if page is None and self.recency and next(iter(self.recency)) not in path:
            self.evict_one()
            page = self.pool.take_high()
        return page

    def _place(self, node: Node, page: int) -> None:
        node.page = page
        self._by_page[page] = node
        heapq.heappush(self._lowest, page)

    def trade_for_lower(self, page: int) -> int:
        """Move the lowest cached page to `page`, which is the caller's, if that is higher; returns the caller's page.

        Without it a full cache would scatter running requests over the whole pool, and decode walks all below the highest.
        """
        self.commit()
        while self._lowest and self._lowest[0] not in self._by_page:
            heapq.heappop(self._lowest)
        if not self._lowest or self._lowest[0] > page:
            return page
        low = heapq.heappop(self._lowest)
        self.pool.copy([low], [page])
        self._place(self._by_page.pop(low), page)
        return low

    def evict_one(self) -> bool:
        """Free the least recently used leaf; False when nothing is cached."""
        if not self.recency:
            return False
        node, _ = self.recency.popitem(last=False)
        self._copies.pop(node.page, None)
        del self._by_page[node.page]
        self.pool.give_back(node.page)
        if node.parent is not None:
            siblings = node.parent.children[node.tokens[0]]
            siblings.remove(node)
            if not siblings:
                del node.parent.children[node.tokens[0]]
        return True

    def clear(self) -> None:
        for node in self.recency:
            self.pool.give_back(node.page)
        self._copies.clear()
        self._by_page.clear()
        self._lowest.clear()
        self.recency.clear()
        self.roots.clear()


def common_prefix(a: Sequence[int], b: Sequence[int]) -> int:
    n = 0
    for x, y in zip(a, b, strict=False):
        if x != y:
            break
        n += 1
    return n
