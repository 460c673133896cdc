"""A session's history: a tree of generations, each with its parent and its own tokens only.

`Linear` (v1) keeps one line and lets the agent take back its latest turn; `Tree` (v2) keeps everything. Both only look while a
request is placed, and change when its generation is committed.

An agent sends its whole conversation with every turn, so old messages are recognised by digest: what the matcher accepted once
in a place is not compared there again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import orjson
import xxhash

from miles.rollout.session.errors import HistoryConflict, RequestRefused, TruncatedGeneration
from miles.rollout.tito.matchers import Matcher, Message
from miles.rollout.tito.mismatch import Checkpoint

MAX_ROLLBACK = 1
MAX_NODES = 1024


@dataclass(eq=False)
class Turn:
    """One generation as the engine gave it.

    Attributes:
        prompt_ids: own prompt tokens, int32: the whole first prompt, or what follows the parent's row.
        output_ids, log_probs: sampled tokens, int32, and their log-probs, float64.
        drop: tokens at the end of the parent's row that this turn's prompt leaves out (0 or 1).
        versions: `(version, start, end)` over the sampled tokens.
        routes: routed experts from row `len(parent row) - 1` on, `[rows, moe layers, topk]`; None where not asked for.
        meta: the engine's counters: prompt_tokens, cached_tokens, weight_version, ...
    """

    prompt_ids: np.ndarray
    output_ids: np.ndarray
    log_probs: np.ndarray
    drop: int
    versions: tuple[tuple[str, int, int], ...]
    finish_reason: str
    response_id: str
    started: float
    ended: float
    routes: np.ndarray | None = None
    meta: dict[str, Any] = field(default_factory=dict)


@dataclass(eq=False)
class Node:
    """A committed turn in its place. `messages` are those after the parent's, the assistant's own one last."""

    seq: int
    parent: Node | None
    messages: list[Message]
    turn: Turn
    identity: str  # of tools and template arguments: a conversation with other tools is another one
    tools: list[dict] | None
    template_kwargs: dict[str, Any] | None
    message_end: int  # messages from the root to here
    row_length: int
    children: list[Node] = field(default_factory=list)
    checked: Checkpoint | None = None
    seen: list[bytes | None] = field(default_factory=list)  # digest of the replay that matched each message last

    def __post_init__(self) -> None:
        self.seen = [None] * len(self.messages)

    @property
    def truncated(self) -> bool:
        return self.turn.finish_reason == "length"

    @property
    def said(self) -> Message:
        return self.messages[-1]

    def path(self) -> list[Node]:
        nodes: list[Node] = []
        node: Node | None = self
        while node is not None:
            nodes.append(node)
            node = node.parent
        return nodes[::-1]

    def row(self) -> np.ndarray:
        """All tokens from the root to here, int32."""
        parts: list[np.ndarray] = []
        for node in self.path():
            if node.turn.drop:
                parts[-1] = parts[-1][: -node.turn.drop]
            parts += [node.turn.prompt_ids, node.turn.output_ids]
        return np.concatenate(parts)

    def conversation(self) -> list[Message]:
        return [message for node in self.path() for message in node.messages]


class Replay:
    """The messages of one request, and of each its digest: of the JSON that it is sent as, key order and number types included."""

    def __init__(self, messages: Sequence[Message]) -> None:
        self.messages = messages
        self._digests: list[bytes] = []

    def __len__(self) -> int:
        return len(self.messages)

    def digest(self, at: int) -> bytes:
        while len(self._digests) <= at:
            message = self.messages[len(self._digests)]
            self._digests.append(xxhash.xxh3_128_digest(orjson.dumps(message, option=orjson.OPT_NON_STR_KEYS)))
        return self._digests[at]


@dataclass(frozen=True)
class Position:
    """Where a request continues: behind `parent`, or as a new beginning; `suffix` is what it adds.

    Attributes:
        head: v1's last turn as the request saw it; a commit needs it unchanged.
        discards: turns that a commit takes back.
    """

    parent: Node | None
    suffix: list[Message]
    head: Node | None = None
    discards: int = 0


@dataclass
class HistoryCounts:
    """What a session lost or repeated, for metrics."""

    rollbacks: int = 0
    discarded_tokens: int = 0
    new_roots: int = 0
    conflicts: int = 0


class History:
    """What both forms share: nodes in commit order.

    Args:
        strict: refuse what takes back a generation (v1) or begins another conversation (v2).
    """

    def __init__(self, matcher: Matcher, *, strict: bool = False) -> None:
        self.matcher, self.strict = matcher, strict
        self.nodes: list[Node] = []
        self.counts = HistoryCounts()
        self.next_seq = 0

    def place(self, messages: Sequence[Message], identity: str) -> Position:
        """Where a conversation continues what is there. Changes nothing. Raises: SessionError where it cannot."""
        raise NotImplementedError

    def commit(
        self,
        position: Position,
        said: Message,
        turn: Turn,
        identity: str,
        tools: list[dict] | None = None,
        template_kwargs: dict[str, Any] | None = None,
    ) -> Node:
        """Add a finished turn at its position. Raises: HistoryConflict when the place is no longer what it was."""
        self._check_room()
        self._check_unchanged(position)
        parent = position.parent
        row = (parent.row_length - turn.drop if parent else 0) + len(turn.prompt_ids) + len(turn.output_ids)
        messages = [*position.suffix, said]
        node = Node(
            seq=self.next_seq,
            parent=parent,
            messages=messages,
            turn=turn,
            identity=identity,
            tools=tools,
            template_kwargs=template_kwargs,
            message_end=(parent.message_end if parent else 0) + len(messages),
            row_length=row,
        )
        self._place_node(position, node)
        self.next_seq += 1
        return node

    def _matched(self, node: Node, replay: Replay) -> int:
        """How many of the node's own messages the request repeats in their place, from the first on."""
        start = node.message_end - len(node.messages)
        for i, stored in enumerate(node.messages):
            if start + i >= len(replay):
                return i
            digest = replay.digest(start + i)
            if node.seen[i] != digest:
                if not self.matcher(stored, replay.messages[start + i]):
                    return i
                node.seen[i] = digest
        return len(node.messages)

    def leaves(self) -> list[Node]:
        return [node for node in self.nodes if not node.children]

    @property
    def head(self) -> Node | None:
        """The turn that was committed last."""
        return self.nodes[-1] if self.nodes else None

    def _check_room(self) -> None:
        if self.next_seq >= MAX_NODES:
            raise RequestRefused(f"the session has {MAX_NODES} generations, the most that one may have")

    def _check_unchanged(self, position: Position) -> None:
        """Raises: HistoryConflict."""

    def _place_node(self, position: Position, node: Node) -> None:
        raise NotImplementedError

    def _add(self, node: Node) -> None:
        self.nodes.append(node)
        if node.parent is not None:
            node.parent.children.append(node)

    def _refuse_truncated(self, node: Node | None) -> None:
        if node is not None and node.truncated:
            raise TruncatedGeneration(
                f"generation {node.seq} was cut off at its token limit and cannot be continued: raise max_tokens, or send the "
                "conversation without it to try again"
            )


class Linear(History):
    """One line (`--use-session-server v1`): extend it, or take back its latest turn."""

    def place(self, messages: Sequence[Message], identity: str) -> Position:
        self._check_room()
        head = self.head
        if head is None:
            return Position(None, list(messages), None)
        path, matched = head.path(), 0
        if identity == head.identity:
            replay = Replay(messages)
            for node in path:
                matched += (found := self._matched(node, replay))
                if found < len(node.messages):
                    break
        if matched == head.message_end:
            self._refuse_truncated(head)
            return Position(head, list(messages[matched:]), head)
        kept = [node for node in path if node.message_end <= matched]
        discards = len(path) - len(kept)
        if discards > MAX_ROLLBACK:
            raise RequestRefused(self._too_deep(discards, messages, matched, identity))
        if self.strict:
            raise RequestRefused(
                f"the request takes back a generation (message {matched} differs from the stored one), which "
                "--session-strict-history does not allow"
            )
        parent = kept[-1] if kept else None
        self._refuse_truncated(parent)
        return Position(parent, list(messages[parent.message_end if parent else 0 :]), head, discards)

    def _too_deep(self, discards: int, messages: Sequence[Message], matched: int, identity: str) -> str:
        assert self.head is not None
        why = f"message {matched} differs from the stored one"
        if identity != self.head.identity:
            why = "its tools or template arguments are other ones than before"
        elif matched == len(messages):
            why = "it is shorter than the stored conversation"
        return (
            f"the request would take back {discards} generations ({why}); a v1 session allows {MAX_ROLLBACK}. "
            f"Stored messages: {self.head.message_end}, request messages: {len(messages)}. Agents that fork or rewrite their history need "
            "--use-session-server v2"
        )

    def _check_unchanged(self, position: Position) -> None:
        if position.head is not self.head:
            self.counts.conflicts += 1
            raise HistoryConflict(
                "another generation of this session was committed while this one ran; nothing was kept"
            )

    def _place_node(self, position: Position, node: Node) -> None:
        if position.discards:
            self.counts.rollbacks += 1
            gone = self.nodes[len(self.nodes) - position.discards :]
            self.counts.discarded_tokens += sum(len(one.turn.output_ids) for one in gone)
            del self.nodes[len(self.nodes) - position.discards :]
            if position.parent is not None:
                position.parent.children.clear()
        self._add(node)


class Tree(History):
    """Everything that was generated (`--use-session-server v2`): a request goes on at the deepest place that it repeats."""

    def place(self, messages: Sequence[Message], identity: str) -> Position:
        self._check_room()
        best: Node | None = None
        replay = Replay(messages)
        stack = [node for node in self.nodes if node.parent is None and node.identity == identity]
        while stack:
            node = stack.pop()
            if self._matched(node, replay) < len(node.messages):
                continue
            if best is None or (node.message_end, node.seq) > (best.message_end, best.seq):
                best = node
            stack.extend(node.children)
        self._refuse_truncated(best)
        if best is None and self.nodes and self.strict:
            raise RequestRefused(
                "the request continues nothing that this session has generated and would begin a new conversation, which "
                "--session-strict-history does not allow"
            )
        return Position(best, list(messages[best.message_end if best else 0 :]))

    def _place_node(self, position: Position, node: Node) -> None:
        if position.parent is None and self.nodes:
            self.counts.new_roots += 1
        self._add(node)


def new_history(version: str, matcher: Matcher, *, strict: bool = False) -> History:
    return (Tree if version == "v2" else Linear)(matcher, strict=strict)
