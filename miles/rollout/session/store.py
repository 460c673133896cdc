"""The sessions of one server: made, found by id and key, counted, expired, and brought back after a restart."""

from __future__ import annotations

import asyncio
import hmac
import logging
import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from miles.rollout.session.errors import SessionNotFound, TooLarge, TooManySessions, WrongKey
from miles.rollout.session.history import History, Node, Position, Turn
from miles.rollout.session.wal import SessionLog

logger = logging.getLogger(__name__)


@dataclass(eq=False)
class Session:
    """One agent's conversation with the model.

    Attributes:
        seed: of the session's random numbers; None lets engines choose.
        max_seq_len: most tokens of one line; None for the model's context.
        running: generations in flight, cancelled when the session is deleted.
        shielded: special tokens that stood in its messages as text.
    """

    id: str
    key: str
    history: History
    seed: int | None = None
    max_seq_len: int | None = None
    bytes: int = 0
    last_used: float = field(default_factory=time.monotonic)
    closing: bool = False
    aborted: bool = False
    running: set[asyncio.Task] = field(default_factory=set)
    attempts: dict[int | None, int] = field(default_factory=dict)
    shielded: int = 0


class SessionStore:
    """Raises SessionNotFound, WrongKey, TooManySessions, TooLarge: each is an answer to a client.

    Args:
        make_history: an empty history of the server's version.
    """

    def __init__(
        self,
        make_history: Callable[[], History],
        log: SessionLog,
        *,
        idle_timeout_s: float,
        max_sessions: int,
        max_bytes: int,
    ) -> None:
        self._make_history, self._log = make_history, log
        self._idle_timeout_s, self._max_sessions, self._max_bytes = idle_timeout_s, max_sessions, max_bytes
        self.sessions: dict[str, Session] = {}
        self.lost: set[str] = set()
        self.bytes = 0
        self.expired = 0

    def create(self, *, seed: int | None = None, max_seq_len: int | None = None) -> Session:
        self.expire()
        if len(self.sessions) >= self._max_sessions:
            raise TooManySessions(
                f"the server has {len(self.sessions)} sessions, the most that --session-max-count allows: delete finished ones"
            )
        session = Session(secrets.token_hex(16), secrets.token_hex(16), self._make_history(), seed, max_seq_len)
        self.sessions[session.id] = session
        record = {"kind": "create", "key": session.key, "seed": seed, "max_seq_len": max_seq_len}
        self._log.append(session.id, record)
        return session

    def get(self, session_id: str, key: str | None) -> Session:
        session = self.sessions.get(session_id)
        if session is None or session.closing:
            why = (
                " was lost when its server ended, because its log is damaged"
                if session_id in self.lost
                else " not found"
            )
            raise SessionNotFound(f"session {session_id}{why}")
        if key is None or not hmac.compare_digest(session.key.encode(), key.encode()):
            raise WrongKey(
                f"session {session_id}: missing or wrong key; use the base URL that holds it, or send Authorization: Bearer KEY"
            )
        session.last_used = time.monotonic()
        return session

    def delete(self, session: Session) -> None:
        """Forget it, and stop what it is generating."""
        session.closing = True
        for task in list(session.running):
            task.cancel()
        self.bytes -= session.bytes
        self.sessions.pop(session.id, None)
        self._log.remove(session.id)

    def expire(self) -> None:
        """Drop sessions that nobody has used for a while and that generate nothing."""
        limit = time.monotonic() - self._idle_timeout_s
        for session in [s for s in self.sessions.values() if s.last_used < limit and not s.running]:
            logger.warning("session %s expired after %.0f s without a request", session.id, self._idle_timeout_s)
            self.delete(session)
            self.expired += 1

    def check_room(self) -> None:
        if self.bytes >= self._max_bytes:
            raise TooLarge(
                f"the server's sessions hold {self.bytes} bytes, the most that --session-max-bytes allows: delete finished ones"
            )

    def committed(self, session: Session, node: Node) -> None:
        """Count a new turn, and write it down before anybody is told of it."""
        size = node_bytes(node)
        session.bytes += size
        self.bytes += size
        session.last_used = time.monotonic()
        self._log.append(session.id, {"kind": "turn", **_node_record(node)})

    def recover(self) -> None:
        """Bring back what the log holds. Sessions with damaged logs are reported as lost when asked for."""
        for session_id, records in self._log.sessions():
            if records is None or records[0].get("kind") != "create":
                self.lost.add(session_id)
                self._log.remove(session_id)
                continue
            made = records[0]
            session = Session(session_id, made["key"], self._make_history(), made["seed"], made["max_seq_len"])
            try:
                for record in records[1:]:
                    session.bytes += node_bytes(_replay(session.history, record))
            except (KeyError, ValueError, TypeError) as error:
                logger.error("session %s is lost: its log cannot be replayed: %s", session_id, error)
                self.lost.add(session_id)
                self._log.remove(session_id)
                continue
            self.sessions[session_id] = session
            self.bytes += session.bytes


def node_bytes(node: Node) -> int:
    """About what a turn takes: 4 bytes a token, 8 more a sampled one, routes, and the text of its messages."""
    turn = node.turn
    arrays = turn.prompt_ids.nbytes + turn.output_ids.nbytes + turn.log_probs.nbytes
    return arrays + (0 if turn.routes is None else turn.routes.nbytes) + sum(len(str(m)) for m in node.messages)


def _node_record(node: Node) -> dict[str, Any]:
    turn = node.turn
    return {
        "seq": node.seq,
        "parent": None if node.parent is None else node.parent.seq,
        "messages": node.messages,
        "identity": node.identity,
        "tools": node.tools if node.parent is None else None,
        "template_kwargs": node.template_kwargs,
        "prompt_ids": turn.prompt_ids.tobytes(),
        "output_ids": turn.output_ids.tobytes(),
        "log_probs": turn.log_probs.tobytes(),
        "routes": None if turn.routes is None else [turn.routes.dtype.str, turn.routes.shape, turn.routes.tobytes()],
        "drop": turn.drop,
        "versions": turn.versions,
        "finish_reason": turn.finish_reason,
        "response_id": turn.response_id,
        "times": [turn.started, turn.ended],
        "meta": turn.meta,
    }


def _replay(history: History, record: dict[str, Any]) -> Node:
    nodes = {node.seq: node for node in history.nodes}
    parent = None if record["parent"] is None else nodes[record["parent"]]
    routes = record["routes"]
    turn = Turn(
        prompt_ids=np.frombuffer(record["prompt_ids"], np.int32),
        output_ids=np.frombuffer(record["output_ids"], np.int32),
        log_probs=np.frombuffer(record["log_probs"], np.float64),
        drop=record["drop"],
        versions=tuple((str(v), a, b) for v, a, b in record["versions"]),
        finish_reason=record["finish_reason"],
        response_id=record["response_id"],
        started=record["times"][0],
        ended=record["times"][1],
        routes=None if routes is None else np.frombuffer(routes[2], routes[0]).reshape(routes[1]),
        meta=record["meta"],
    )
    *suffix, said = record["messages"]
    line = history.head.path() if history.head else []
    discards = len(line) - (line.index(parent) + 1 if parent in line else 0)
    position = Position(parent, suffix, history.head, discards)
    history.next_seq = record["seq"]
    tools = parent.tools if parent is not None else record["tools"]
    return history.commit(position, said, turn, record["identity"], tools, record["template_kwargs"])
