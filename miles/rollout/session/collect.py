"""What a session says about itself, and the samples that it gives: the same facts for GET, for metrics and for training."""

from __future__ import annotations

import logging
from typing import Any

import xxhash

from miles.rollout.session.config import SessionConfig
from miles.rollout.session.history import Node
from miles.rollout.session.samples import AssemblyError, LeafSample, apply_hook, assemble, train_each_turn_once
from miles.rollout.session.store import Session
from miles.rollout.session.wire import SessionSamples
from miles.rollout.tito.boundary import TitoTokenizer
from miles.rollout.tito.mismatch import MismatchComparator
from miles.utils.imports import load_function

logger = logging.getLogger(__name__)

# What the server knows better than an agent that wants to set it.
SERVER_KEYS = ("tito_session_mismatch", "leaf", "session", "session_version", "lifecycle")


class Collector:
    """Builds samples and descriptions of one server's sessions."""

    def __init__(self, config: SessionConfig, tito: TitoTokenizer) -> None:
        self.config, self.tito = config, tito
        self.comparator = MismatchComparator(tito)
        self._picker, self._postprocessor = load_function(config.picker), load_function(config.postprocessor)

    # ---- facts -------------------------------------------------------------------------------------------------------

    def metadata(self, session: Session) -> dict[str, Any]:
        """Counts, the last line's mismatch, and for branching sessions the tree."""
        history = session.history
        out: dict[str, Any] = {
            "session_version": self.config.version,
            "session": {**vars(history.counts), "generations": len(history.nodes), "special_text": session.shielded},
            "max_trim_tokens": 1,
        }
        head = history.head
        if head is not None:
            out["accumulated_token_ids"] = head.row().tolist()
            mismatch = self.mismatch(head)
            out |= {} if mismatch is None else {"tito_session_mismatch": mismatch}
        if self.config.version == "v2":
            out["tree"] = {
                "nodes": [_node_view(node) for node in history.nodes],
                "leaves": [{"node_id": n.seq, "path_node_ids": _path_ids(n)} for n in history.leaves()],
            }
        return out

    def records(self, session: Session) -> list[dict[str, Any]]:
        """The turns of the last line: what each added, and its tokens."""
        head = session.history.head
        return [_record(node) for node in head.path()] if head is not None else []

    def mismatch(self, node: Node) -> list[dict[str, Any]] | None:
        """Differences of a line from a fresh rendering; None where the template refuses what the agent said."""
        path = node.path()
        sampled, count = set(), 0
        for one in path:
            count += len(one.messages)
            sampled.add(count - 1)
        resume = next((one.checked for one in reversed(path) if one.checked is not None), None)
        kwargs = self.tito.template.merged_kwargs(self.tito.template.kwargs, node.template_kwargs or {})
        try:
            found, node.checked = self.comparator.compare(
                node.row().tolist(), node.conversation(), node.tools, kwargs, sampled=sampled, resume=resume
            )
        except ValueError as error:
            logger.warning("no diagnosis of a session: %s", error)
            return None
        return found

    # ---- samples -------------------------------------------------------------------------------------------------------

    def collect(
        self, session: Session, max_seq_len: int | None = None, agent_metadata: dict[str, Any] | None = None
    ) -> SessionSamples:
        """Raises: AssemblyError when the history makes no samples, or a hook breaks its contract."""
        metadata = self.metadata(session)
        if not session.history.nodes:
            return SessionSamples([], metadata, "no_records")
        tree = self.config.version == "v2"
        leaves = session.history.leaves() if tree else [session.history.nodes[-1]]
        found = [one for leaf in leaves if (one := assemble(leaf, self.tito.encoder.decode, max_seq_len)) is not None]
        for one in found:
            self._describe(one, metadata, tree)
        if tree:
            found = self._picked(found, metadata)
        for one in found:
            self._adopt(one, agent_metadata or {})
        samples = [one.sample for one in found]
        if tree and samples:
            samples = apply_hook(self.config.postprocessor, self._postprocessor, samples, metadata, may_drop=False)
        return SessionSamples(samples, metadata, None if samples else "all_truncated")

    def _describe(self, one: LeafSample, metadata: dict[str, Any], tree: bool) -> None:
        node, out = one.node, one.sample.metadata
        mismatch = self.mismatch(node)
        out |= {} if mismatch is None else {"tito_session_mismatch": mismatch}
        out |= {"session_version": self.config.version, "session": metadata["session"]}
        if tree:
            out["leaf"] = {
                "node_id": node.seq,
                "parent": None if node.parent is None else node.parent.seq,
                "path_node_ids": _path_ids(node),
                "response_id": node.turn.response_id,
            }
        if self.config.record_messages:
            out["messages"] = node.conversation()

    def _picked(self, found: list[LeafSample], metadata: dict[str, Any]) -> list[LeafSample]:
        if not found:
            return []
        by_sample = {id(one.sample): one for one in found}
        samples = [one.sample for one in found]
        picked = apply_hook(self.config.picker, self._picker, samples, metadata, may_drop=True)
        kept = [by_sample[id(sample)] for sample in picked]
        train_each_turn_once(kept)
        return kept

    def _adopt(self, one: LeafSample, agent_metadata: dict[str, Any]) -> None:
        """The agent's own facts, under the server's; its reward is the reward of every sample."""
        facts = {k: v for k, v in agent_metadata.items() if k not in SERVER_KEYS}
        one.sample.metadata = {**facts, **one.sample.metadata}
        if facts.get("reward") is not None:
            one.sample.reward = facts["reward"]


def _path_ids(node: Node) -> list[int]:
    return [one.seq for one in node.path()]


def _node_view(node: Node) -> dict[str, Any]:
    turn = node.turn
    end = node.row_length
    return {
        "id": node.seq,
        "seq": node.seq,
        "parent": None if node.parent is None else node.parent.seq,
        "truncated": node.truncated,
        "started_at": turn.started,
        "committed_at": turn.ended,
        "completion_span": [end - len(turn.output_ids), end],
        "num_tokens": end,
        "response_id": turn.response_id,
        "prompt_hash": xxhash.xxh3_64_hexdigest(turn.prompt_ids.tobytes()),
    }


def _record(node: Node) -> dict[str, Any]:
    turn = node.turn
    return {
        "messages": node.messages,
        "tools": node.tools,
        "prompt_ids": turn.prompt_ids.tolist(),
        "dropped_before": turn.drop,
        "output_ids": turn.output_ids.tolist(),
        "log_probs": turn.log_probs.tolist(),
        "versions": [{"version": v, "start": a, "end": b} for v, a, b in turn.versions],
        "finish_reason": turn.finish_reason,
        "response_id": turn.response_id,
        "request_timestamp": turn.started,
        "timestamp": turn.ended,
        "meta": turn.meta,
    }


__all__ = ["AssemblyError", "Collector"]
