"""Samples between the session server and the rollout process: one safetensors buffer.

Per-token fields are tensors `FIELD.INDEX`; the rest is JSON in the tensor `_samples_meta`:
`{"samples": [...], "session_metadata": {...}, "empty_reason": null | "no_records" | "all_truncated"}`.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

import numpy as np
import orjson
from safetensors import SafetensorError
from safetensors.numpy import load, save

from miles.utils.types import PrefixCacheInfo, Sample, SampleStatus, SpecInfo, VersionSpan

_META = "_samples_meta"
_TENSORS = {
    "tokens": np.int64,
    "loss_mask": np.uint8,
    "rollout_log_probs": np.float64,
}
_ROUTES = "rollout_routed_experts"  # [tokens - 1, moe layers, topk], in whichever integer type holds the experts


@dataclass(frozen=True)
class SessionSamples:
    """What a session gave. `empty_reason` says why there are no samples."""

    samples: list[Sample]
    session_metadata: dict[str, Any]
    empty_reason: str | None = None


def encode_samples(content: SessionSamples) -> bytes:
    """Raises: ValueError when a value would not survive its type."""
    tensors: dict[str, np.ndarray] = {}
    rows = []
    for i, sample in enumerate(content.samples):
        for name, dtype in _TENSORS.items():
            value = getattr(sample, name)
            if value is None:
                continue
            exact = np.asarray(value)
            array = np.ascontiguousarray(exact, dtype=dtype)
            if not np.array_equal(array, exact):
                raise ValueError(f"sample {i}: {name} does not fit {np.dtype(dtype).name}")
            tensors[f"{name}.{i}"] = array
        if sample.rollout_routed_experts is not None:
            tensors[f"{_ROUTES}.{i}"] = np.ascontiguousarray(sample.rollout_routed_experts)
        rows.append(
            {
                "response": sample.response,
                "response_length": sample.response_length,
                "status": sample.status.value,
                "weight_versions": sample.weight_versions,
                "version_spans": [(s.version, s.start, s.end) for s in sample.version_spans],
                "prefix_cache_info": vars(sample.prefix_cache_info),
                "spec_info": vars(sample.spec_info),
                "reward": sample.reward,
                "metadata": sample.metadata,
            }
        )
    meta = {"samples": rows, "session_metadata": content.session_metadata, "empty_reason": content.empty_reason}
    tensors[_META] = np.frombuffer(orjson.dumps(meta, option=orjson.OPT_SERIALIZE_NUMPY), dtype=np.uint8)
    return save(tensors)


def decode_samples(data: bytes, source: Sample) -> SessionSamples:
    """Samples in the image of `source`: its identity, prompt and label, with what the session says of tokens and outcome.

    Raises: ValueError for a buffer that is not what `encode_samples` writes.
    """
    try:
        tensors = load(data)
        meta = orjson.loads(tensors.pop(_META).tobytes())
        samples = [_sample(row, i, tensors, source) for i, row in enumerate(meta["samples"])]
        if tensors:
            raise ValueError(f"tensors without a sample: {', '.join(sorted(tensors))}")
        return SessionSamples(samples, meta["session_metadata"], meta["empty_reason"])
    except (SafetensorError, KeyError, TypeError, AttributeError, orjson.JSONDecodeError) as error:
        raise ValueError(f"the session server's samples cannot be read: {type(error).__name__}: {error}") from error


def _sample(row: dict[str, Any], i: int, tensors: dict[str, np.ndarray], source: Sample) -> Sample:
    sample = copy.deepcopy(source)
    for name, dtype in _TENSORS.items():
        array = tensors.pop(f"{name}.{i}", None)
        if array is not None and array.dtype != dtype:
            raise ValueError(f"{name}.{i} has type {array.dtype}, not {np.dtype(dtype).name}")
        setattr(sample, name, None if array is None else array.tolist())
    sample.rollout_routed_experts = tensors.pop(f"{_ROUTES}.{i}", None)
    sample.response, sample.response_length = row["response"], row["response_length"]
    sample.status = SampleStatus(row["status"])
    sample.weight_versions = row["weight_versions"]
    sample.version_spans = [VersionSpan(*span) for span in row["version_spans"]]
    sample.prefix_cache_info = PrefixCacheInfo(**row["prefix_cache_info"])
    sample.spec_info = SpecInfo(**row["spec_info"])
    if row["reward"] is not None:
        sample.reward = row["reward"]
    sample.metadata.update(row["metadata"])
    sample.validate()
    return sample
