"""Which leaves of a branching session train: `(leaf_samples, session_metadata) -> samples`, the same objects, any order."""

from __future__ import annotations

from typing import Any

from miles.utils.types import Sample


def drop_retries(leaf_samples: list[Sample], session_metadata: dict[str, Any]) -> list[Sample]:
    """Leave out answers that were asked for again; the latest one of each counts.

    A leaf is such an answer when a later sibling answers the same prompt and was begun after the leaf had ended. Siblings that
    ran at the same time, or that were asked something else, are sub-agents or branches, and stay, as does every line that
    went on. Longest lines first.
    """
    nodes = {node["id"]: node for node in session_metadata["tree"]["nodes"]}
    kept = [s for s in leaf_samples if not _was_asked_again(nodes[s.metadata["leaf"]["node_id"]], nodes)]
    return sorted(kept, key=_length_and_age, reverse=True)


def keep_all(leaf_samples: list[Sample], session_metadata: dict[str, Any]) -> list[Sample]:
    """Every leaf, longest lines first."""
    return sorted(leaf_samples, key=_length_and_age, reverse=True)


def _length_and_age(sample: Sample) -> tuple[int, int]:
    leaf = sample.metadata["leaf"]
    return len(leaf["path_node_ids"]), leaf["node_id"]


def _was_asked_again(leaf: dict[str, Any], nodes: dict[int, dict[str, Any]]) -> bool:
    return any(
        node["parent"] == leaf["parent"]
        and node["seq"] > leaf["seq"]
        and node["prompt_hash"] == leaf["prompt_hash"]
        and node["started_at"] >= leaf["committed_at"]
        for node in nodes.values()
    )
