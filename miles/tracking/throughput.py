"""How fast a batch was generated. Everything here depends on the clock, or on what met in the engine, so all is `perf/`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from miles.tracking.statistics import Metrics, describe
from miles.utils.types import Sample


def throughput_metrics(args: Any, samples: Sequence[Sample], seconds: float) -> Metrics:
    """`perf/*` of generating a batch in `seconds` of wall time.

    Tokens are response tokens; "effective" ones are those that the model sampled. "Per GPU" divides by
    `--rollout-num-gpus`, which without GPUs is the number of engine processes.
    """
    out = {"perf/rollout_time": seconds}
    if not samples:
        return out
    tokens = sum(s.response_length for s in samples)
    effective = sum(s.effective_response_length for s in samples)
    gpus = getattr(args, "rollout_num_gpus", None) or 1
    out |= describe("perf/non_generation_time", [s.non_generation_time for s in samples])
    out |= _cache_metrics(samples)
    if seconds <= 0:
        return out
    longest = max(samples, key=lambda s: s.response_length)
    longest_effective = max(samples, key=lambda s: s.effective_response_length)
    out["perf/tokens_per_gpu_per_sec"] = tokens / seconds / gpus
    out["perf/effective_tokens_per_gpu_per_sec"] = effective / seconds / gpus
    out["perf/longest_sample_tokens_per_sec"] = longest.response_length / seconds
    out["perf/longest_effective_sample_tokens_per_sec"] = longest_effective.effective_response_length / seconds
    waited = longest_effective.non_generation_time
    out["perf/longest_effective_sample_non_generation_time"] = waited
    if seconds > waited:
        rate = longest_effective.effective_response_length / (seconds - waited)
        out["perf/longest_effective_sample_tokens_per_sec_without_non_generation"] = rate
    return out


def _cache_metrics(samples: Sequence[Sample]) -> Metrics:
    prompt = sum(s.prefix_cache_info.total_prompt_tokens for s in samples)
    if not prompt:
        return {}
    cached = sum(s.prefix_cache_info.cached_tokens for s in samples)
    return {
        "perf/prefix_cache_hit_rate": cached / prompt,
        "perf/avg_cached_tokens_per_sample": cached / len(samples),
    }
