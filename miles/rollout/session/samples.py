"""From a session's history to training samples: one for its line (v1), one for each leaf that the picker keeps (v2)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from miles.rollout.session.history import Node
from miles.utils.types import Sample, SampleStatus, VersionSpan

_STATUS = {
    "stop": SampleStatus.COMPLETED,
    "tool_calls": SampleStatus.COMPLETED,
    "length": SampleStatus.TRUNCATED,
    "abort": SampleStatus.ABORTED,
}


class AssemblyError(ValueError):
    """A history that does not make a sample, or a hook that broke its contract; becomes HTTP 422."""


@dataclass(frozen=True)
class LeafSample:
    """A sample and where its turns stand in it: `spans[node.seq]` are its sampled tokens, in response coordinates."""

    node: Node
    sample: Sample
    spans: dict[int, tuple[int, int]]


def assemble(leaf: Node, decode: Callable[[list[int]], str], max_seq_len: int | None = None) -> LeafSample | None:
    """The trajectory that ends in `leaf`: sampled tokens have mask 1 and their log-probs, everything between mask 0.

    With `max_seq_len`, what lies beyond is cut off and the sample is TRUNCATED; None when nothing sampled is left.
    Raises: AssemblyError when tokens and per-token fields do not fit together.
    """
    path = leaf.path()
    sample = Sample(tokens=path[0].turn.prompt_ids.tolist(), loss_mask=[], rollout_log_probs=[])
    prompt, spans = len(sample.tokens), {}
    routes: list[np.ndarray] | None = []
    for i, node in enumerate(path):
        turn = node.turn
        if i:
            _drop(sample, turn.drop)
            sample.append_response(turn.prompt_ids.tolist(), log_probs=None, trainable=False)
        start = sample.response_length
        versions = [VersionSpan(int(v), a, b) for v, a, b in turn.versions if v.isdigit()]
        sample.append_response(
            turn.output_ids.tolist(), log_probs=turn.log_probs.tolist(), trainable=True, spans=versions
        )
        spans[node.seq] = (start, sample.response_length)
        routes = _with_routes(routes, turn.routes, len(sample.tokens))
        sample.status = _STATUS.get(turn.finish_reason, SampleStatus.PENDING)
        _count(sample, turn.meta)
        sample.metadata.setdefault("lifecycle", []).append({"t0": turn.started, "t1": turn.ended, "turn": i})
    if routes:
        sample.rollout_routed_experts = np.concatenate(routes)[: len(sample.tokens) - 1]
    if max_seq_len is not None and len(sample.tokens) > max_seq_len:
        if not _cut(sample, max_seq_len - prompt):
            return None
        spans = {
            seq: (a, min(b, sample.response_length)) for seq, (a, b) in spans.items() if a < sample.response_length
        }
    sample.response = decode(sample.tokens[prompt:])
    try:
        sample.validate()
    except ValueError as error:
        raise AssemblyError(str(error)) from error
    return LeafSample(leaf, sample, spans)


def _drop(sample: Sample, count: int) -> None:
    """Leave out a stop token that the next message's opener stands for."""
    if count:
        _keep(sample, sample.response_length - count)


def _cut(sample: Sample, length: int) -> bool:
    """Shorten the response to `length` and to its last sampled token. False when none is left."""
    length = max(length, 0)
    assert sample.loss_mask is not None
    while length and not sample.loss_mask[length - 1]:
        length -= 1
    if not length:
        return False
    _keep(sample, length)
    sample.status = SampleStatus.TRUNCATED
    return True


def _keep(sample: Sample, length: int) -> None:
    sample.strip_last_output_tokens(sample.response_length - length, _NoText())


class _NoText:
    """The text is decoded once, at the end."""

    def decode(self, ids: list[int]) -> str:
        return ""


def _with_routes(have: list[np.ndarray] | None, new: np.ndarray | None, tokens: int) -> list[np.ndarray] | None:
    """Rows of all turns so far, if each turn has some: one for each token but the last."""
    if have is None or new is None:
        return None
    rows = sum(map(len, have))
    # A dropped stop token had a row already; the engine's rows begin where the parent's ended before the drop.
    overlap = rows + len(new) - (tokens - 1)
    if overlap:
        kept = np.concatenate(have)[: rows - overlap] if overlap > 0 else None
        if kept is None:
            raise AssemblyError(f"routed experts cover {rows + len(new)} of {tokens - 1} rows")
        have = [kept]
    return [*have, new]


def _count(sample: Sample, meta: dict[str, Any]) -> None:
    if meta.get("weight_version") is not None:
        sample.weight_versions.append(str(meta["weight_version"]))
    sample.prefix_cache_info.cached_tokens += meta.get("cached_tokens") or 0
    sample.prefix_cache_info.total_prompt_tokens += meta.get("prompt_tokens") or 0
    sample.spec_info.completion_token_num += meta.get("completion_tokens") or 0
    for name in ("spec_accept_token_num", "spec_draft_token_num", "spec_verify_ct"):
        setattr(sample.spec_info, name, getattr(sample.spec_info, name) + (meta.get(name) or 0))


# ---- branching sessions ------------------------------------------------------------------------------------------------

Hook = Callable[[list[Sample], dict[str, Any]], list[Sample]]


def train_each_turn_once(kept: list[LeafSample]) -> None:
    """Mask each shared generation in all samples but the earliest of those that have it (by leaf, in commit order)."""
    owner: dict[int, int] = {}
    for one in sorted(kept, key=lambda one: one.node.seq):
        for seq in one.spans:
            owner.setdefault(seq, one.node.seq)
    for one in kept:
        assert one.sample.loss_mask is not None
        for seq, (start, end) in one.spans.items():
            if owner[seq] != one.node.seq:
                one.sample.loss_mask[start:end] = [0] * (end - start)


def apply_hook(
    name: str, hook: Hook, samples: list[Sample], metadata: dict[str, Any], *, may_drop: bool
) -> list[Sample]:
    """Call a picker or post-processor and hold it to its contract: the same objects, each once.

    Raises: AssemblyError that names the hook.
    """
    try:
        out = hook(list(samples), metadata)
    except Exception as error:
        raise AssemblyError(f"{name} raised {type(error).__name__}: {error}") from error
    if not isinstance(out, list):
        raise AssemblyError(f"{name} returned a {type(out).__name__}, not a list of samples")
    known, seen = {id(sample) for sample in samples}, {id(sample) for sample in out}
    if len(seen) != len(out):
        raise AssemblyError(f"{name} returned a sample twice")
    if not seen <= known:
        raise AssemblyError(f"{name} returned a sample that it was not given")
    if not may_drop and seen != known:
        raise AssemblyError(f"{name} dropped a sample; only the picker may")
    return out
