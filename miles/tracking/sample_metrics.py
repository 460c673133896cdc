"""Metrics of samples one by one: lengths, outcomes, turns, categories, speculation, token contracts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from miles.tracking.statistics import Metrics, describe, is_repetitive, mean
from miles.utils.types import Sample, SampleStatus

_OUTCOMES = (SampleStatus.COMPLETED, SampleStatus.TRUNCATED, SampleStatus.ABORTED, SampleStatus.FAILED)


def length_metrics(samples: Sequence[Sample]) -> Metrics:
    """`response_len/*`, in tokens that the model sampled (tool output left out), and `repetition_frac`."""
    out = describe("response_len", [float(s.effective_response_length) for s in samples])
    if samples:
        out["repetition_frac"] = mean(float(is_repetitive(s.response)) for s in samples)
    return out


def outcome_metrics(samples: Sequence[Sample]) -> Metrics:
    """`truncated_ratio`, `outcome/{completed,truncated,aborted,failed}` as shares of the samples, and the number of
    failed ones by category, `outcome/failed/{category}`."""
    if not samples:
        return {}
    counts = Counter(s.status for s in samples)
    out = {f"outcome/{status.value}": counts[status] / len(samples) for status in _OUTCOMES}
    out["truncated_ratio"] = out["outcome/truncated"]
    categories = Counter(s.failure.category for s in samples if s.failure is not None)
    return out | {f"outcome/failed/{name}": float(n) for name, n in sorted(categories.items())}


def reward_category_metrics(args: Any, samples: Sequence[Sample]) -> Metrics:
    """`error_cat/{value}`: share of the samples whose reward dictionary has that value at `--log-reward-category`."""
    key = getattr(args, "log_reward_category", None)
    if not key or not samples:
        return {}
    values = Counter(str(s.reward[key]) for s in samples if isinstance(s.reward, dict) and key in s.reward)
    return {f"error_cat/{value}": count / len(samples) for value, count in sorted(values.items())}


def speculation_metrics(args: Any, samples: Sequence[Sample]) -> Metrics:
    """`spec_accept_rate` and `spec_accept_length`, where a draft model speculated; over all tokens of the batch."""
    drafted = sum(s.spec_info.spec_draft_token_num for s in samples)
    verified = sum(s.spec_info.spec_verify_ct for s in samples)
    out: Metrics = {}
    if drafted:
        out["spec_accept_rate"] = sum(s.spec_info.spec_accept_token_num for s in samples) / drafted
    if verified:
        out["spec_accept_length"] = sum(s.spec_info.completion_token_num for s in samples) / verified
    return out


_HARD = ("special_token_count", "special_token_type", "non_assistant_text")


def tito_metrics(samples: Sequence[Sample]) -> Metrics:
    """`tito_session_mismatch_rate/{v1,v2}`: share of the session samples whose tokens differ from a fresh rendering of
    their messages, and the share with each kind of difference."""
    out: Metrics = {}
    found: dict[str, list[list[dict[str, Any]]]] = {}
    for sample in samples:
        metadata = sample.metadata if isinstance(sample.metadata, dict) else {}
        if "tito_session_mismatch" in metadata:
            version = "v2" if metadata.get("session_version") == "v2" or "leaf" in metadata else "v1"
            found.setdefault(version, []).append(metadata["tito_session_mismatch"] or [])
    for version, lists in sorted(found.items()):
        rate = f"tito_session_mismatch_rate/{version}"
        out[rate] = mean(float(bool(entries)) for entries in lists)
        for kind in (*_HARD, "assistant_text"):
            out[f"{rate}/{kind}"] = mean(float(any(e.get("type") == kind for e in entries)) for entries in lists)
    return out


def session_metrics(samples: Sequence[Sample]) -> Metrics:
    """`session/*`: mean a session of generations, rollbacks, discarded tokens, new roots, conflicts, and spellings of special
    tokens that were kept as text. Samples of one execution tell of the same session, which counts once."""
    sessions = {
        s.execution_id: s.metadata["session"]
        for s in samples
        if isinstance(s.metadata, dict) and isinstance(s.metadata.get("session"), dict)
    }
    names = sorted({name for facts in sessions.values() for name in facts})
    return {f"session/{name}": mean(float(facts.get(name, 0)) for facts in sessions.values()) for name in names}


def turn_metrics(samples: Sequence[Sample]) -> Metrics:
    """`multi_turn/*` (`--log-multi-turn`): response tokens with and without those of tools, and turns."""
    with_tools = [float(s.response_length) for s in samples]
    sampled = [float(s.effective_response_length) for s in samples]
    out = describe("multi_turn/raw_response_length", with_tools)
    out |= describe("multi_turn/wo_obs_response_length", sampled)
    rounds = [s.metadata.get("round_number") for s in samples]
    return out | describe("multi_turn/round_number", [float(r) for r in rounds if isinstance(r, int | float)])
