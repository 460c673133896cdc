"""Which weight versions sampled the batch, and how old they are."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from miles.tracking.statistics import Metrics, describe, mean
from miles.utils.types import Sample


@dataclass(frozen=True)
class VersionCounts:
    """Sampled tokens of one trajectory by the weight version that sampled them; `unknown` ones carry none."""

    tokens: dict[int, int]
    unknown: int

    @classmethod
    def of(cls, sample: Sample) -> VersionCounts:
        mask = sample.loss_mask
        total = sample.effective_response_length
        tokens: dict[int, int] = defaultdict(int)
        for span in sample.version_spans:
            count = span.end - span.start if mask is None else sum(mask[span.start : span.end])
            if count:
                tokens[span.version] += count
        return cls(dict(tokens), total - sum(tokens.values()))


def version_metrics(samples: Sequence[Sample], current_version: int | None = None) -> Metrics:
    """`rollout/weight_version/*`, `contract/version_coverage`, and with `current_version` `rollout/staleness/*`.

    - `weight_version/{mean,median,max,min}`: version of each sample's oldest token.
    - `weight_version/mixed_version_ratio`: share of the versioned samples with tokens of more than one version.
    - `weight_version/sample_coverage`: share of the samples with a version at all.
    - `contract/version_coverage`: share of the sampled tokens that carry a version.
    """
    if not samples:
        return {}
    counts = [VersionCounts.of(s) for s in samples]
    oldest = [float(s.oldest_weight_version) for s in samples if s.oldest_weight_version is not None]
    versioned = [s for s in samples if s.oldest_weight_version is not None]
    out = describe("rollout/weight_version", oldest)
    if versioned:
        out["rollout/weight_version/mixed_version_ratio"] = mean(float(len(_versions(s)) > 1) for s in versioned)
    out["rollout/weight_version/sample_coverage"] = len(versioned) / len(samples)
    sampled = sum(s.effective_response_length for s in samples)
    if sampled:
        out["contract/version_coverage"] = sum(sum(c.tokens.values()) for c in counts) / sampled
    if current_version is not None:
        out |= staleness_metrics(samples, current_version)
    return out


def _versions(sample: Sample) -> set[Any]:
    if sample.version_spans:
        return {span.version for span in sample.version_spans}
    return set(sample.weight_versions)


def staleness_metrics(samples: Sequence[Sample], current_version: int) -> Metrics:
    """`rollout/staleness/*` of the prompt groups, in weight versions behind `current_version`, c.

    - `old_mean`, `old_max`: c minus the group's oldest token's version; what `--max-weight-staleness` limits.
    - `post_mean`: c minus its newest token's version: how long it waited after it was finished.
    - `gen_mean`: newest minus oldest: updates that landed while it was generated.
    - `token_weighted`: c minus the mean version over all sampled tokens: the typical token's age.

    Groups and tokens without versions do not count. Source: Miles v0.1 article, section 5.
    """
    groups: dict[Any, list[int]] = defaultdict(list)
    weighted, tokens = [], 0
    for position, sample in enumerate(samples):
        key = ("alone", position) if sample.group_index is None else sample.group_index
        counts = VersionCounts.of(sample).tokens
        groups[key] += counts
        weighted += [version * count for version, count in counts.items()]
        tokens += sum(counts.values())
    spans = [(min(versions), max(versions)) for versions in groups.values() if versions]
    if not spans:
        return {}
    prefix = "rollout/staleness"
    return {
        f"{prefix}/old_mean": mean(current_version - low for low, _ in spans),
        f"{prefix}/old_max": float(max(current_version - low for low, _ in spans)),
        f"{prefix}/post_mean": mean(current_version - high for _, high in spans),
        f"{prefix}/gen_mean": mean(high - low for low, high in spans),
        f"{prefix}/token_weighted": current_version - math.fsum(weighted) / tokens,
    }
