"""Metrics of the batch that is trained, and of evaluations: rollout side, computed from samples.

Everything here but `perf/` depends on the samples alone, and so is the same in two runs of one seed.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from miles.tracking.sample_metrics import (
    Metrics,
    length_metrics,
    outcome_metrics,
    reward_category_metrics,
    session_metrics,
    speculation_metrics,
    tito_metrics,
    turn_metrics,
)
from miles.tracking.statistics import mean, pass_at_k
from miles.tracking.throughput import throughput_metrics
from miles.tracking.version_metrics import version_metrics
from miles.utils.imports import load_function
from miles.utils.types import Sample


def compute_rollout_metrics(
    args: Any,
    samples: Sequence[Sample],
    seconds: float,
    *,
    rollout_id: int | None = None,
    extra: Mapping[str, float] | None = None,
    current_version: int | None = None,
) -> Metrics:
    """Metrics of one training batch, by full name.

    Args:
        samples: the batch that is trained, flat; not what was generated and dropped.
        seconds: wall time of generating it.
        rollout_id: for `--custom-rollout-log-function-path`.
        extra: metrics of the rollout function; names without a prefix get `rollout/`, and they win.
        current_version: the published weight version, for `rollout/staleness/*`.
    Returns: the metrics, or only `extra` where the custom log function returned True (it logged by itself).
    """
    added = _prefixed(extra, "rollout/")
    hook = load_function(getattr(args, "custom_rollout_log_function_path", None))
    if hook is not None and hook(rollout_id, args, list(samples), dict(added), seconds):
        return added
    metrics: Metrics = {}
    metrics |= _under("rollout/", sample_metrics(args, samples))
    metrics |= reward_metrics(args, samples)
    if getattr(args, "loss_type", None) != "sft_loss":  # text from a data set was sampled by no version of the policy
        metrics |= version_metrics(samples, current_version)
    if getattr(args, "log_passrate", False):
        metrics |= passrate_metrics(args, samples)
    if getattr(args, "log_multi_turn", False):
        metrics |= turn_metrics(samples)
    metrics |= throughput_metrics(args, samples, seconds)
    return metrics | added


def compute_eval_metrics(
    args: Any,
    data: Mapping[str, Mapping[str, list]],
    *,
    rollout_id: int | None = None,
    extra: Mapping[str, float] | None = None,
) -> Metrics:
    """Metrics of one evaluation, by full name.

    Args:
        data: `{dataset: {"rewards": [...], "truncated": [...], "samples": [...]}}`; a reward that failed is None.
        extra: metrics of the evaluation function; names without a prefix get `eval/`, and they win.
    Returns: `eval/{dataset}` (mean of the rewards that there are; absent if there is none), its `-none_reward_ratio`,
        `-truncated_ratio` and, with several samples a prompt, `-pass@k`, and `eval/{dataset}/*` of the samples; only
        `extra` where the custom log function returned True.
    """
    added = _prefixed(extra, "eval/")
    hook = load_function(getattr(args, "custom_eval_rollout_log_function_path", None))
    if hook is not None and hook(rollout_id, args, data, dict(added)):
        return added
    metrics: Metrics = {}
    for name, result in data.items():
        rewards = [r for r in result["rewards"] if r is not None]
        if rewards:
            metrics[f"eval/{name}"] = mean(rewards)
        total = len(result["rewards"])
        if total:
            metrics[f"eval/{name}-none_reward_ratio"] = (total - len(rewards)) / total
        if result.get("truncated"):
            metrics[f"eval/{name}-truncated_ratio"] = mean(map(float, result["truncated"]))
        if result.get("samples"):
            metrics |= _under(f"eval/{name}/", sample_metrics(args, result["samples"], eval=True))
            groups = list(reward_groups(args, result["samples"], eval=True).values())
            size = max(map(len, groups))  # the data set's own number of samples a prompt
            metrics |= _under(f"eval/{name}-", pass_rates(groups, size)) if size > 1 else {}
    return metrics | added


def _prefixed(extra: Mapping[str, float] | None, prefix: str) -> Metrics:
    return {name if "/" in name else prefix + name: value for name, value in (extra or {}).items()}


def _under(prefix: str, metrics: Metrics) -> Metrics:
    return {prefix + name: value for name, value in metrics.items()}


# ---- parts -----------------------------------------------------------------------------------------------------------


def sample_metrics(args: Any, samples: Sequence[Sample], *, eval: bool = False) -> Metrics:
    """What training batches and evaluations have in common; names without the prefix."""
    metrics = length_metrics(samples) | outcome_metrics(samples)
    metrics |= zero_std_metrics(args, samples, eval=eval)
    metrics |= speculation_metrics(args, samples)
    metrics |= reward_category_metrics(args, samples)
    metrics |= tito_metrics(samples)
    metrics |= session_metrics(samples)
    return metrics


def reward_of(args: Any, sample: Sample, *, eval: bool = False) -> float | None:
    """The number that a sample's reward stands for, or None."""
    reward = sample.reward
    if isinstance(reward, dict):
        own = getattr(args, "eval_reward_key", None) if eval else None
        reward = reward.get(own or getattr(args, "reward_key", None) or "")
    return float(reward) if isinstance(reward, bool | int | float) else None


def reward_groups(args: Any, samples: Sequence[Sample], *, eval: bool = False) -> dict[Any, list[float | None]]:
    """Rewards by prompt group, one an execution: siblings that one execution yields share a reward."""
    groups: dict[Any, dict[Any, float | None]] = defaultdict(dict)
    for position, sample in enumerate(samples):
        group = ("alone", position) if sample.group_index is None else sample.group_index
        execution = position if sample.execution_id is None else sample.execution_id
        groups[group].setdefault(execution, reward_of(args, sample, eval=eval))
    return {group: list(rewards.values()) for group, rewards in groups.items()}


def reward_metrics(args: Any, samples: Sequence[Sample]) -> Metrics:
    """`rollout/raw_reward`: mean over samples of the reward before normalisation (`metadata["raw_reward"]` overrides)."""
    values = []
    for sample in samples:
        own = sample.metadata.get("raw_reward") if isinstance(sample.metadata, dict) else None
        value = own if isinstance(own, int | float) else reward_of(args, sample)
        if value is not None:
            values.append(float(value))
    return {"rollout/raw_reward": mean(values)} if values else {}


def zero_std_metrics(args: Any, samples: Sequence[Sample], *, eval: bool = False) -> Metrics:
    """Groups whose rewards are all equal, and so teach nothing under group normalisation.

    `zero_std/count_{r}`: groups in which every reward is r (rounded to one decimal); `zero_std/all_zero_percentage` and
    `all_one_percentage`: their share of the groups of more than one, 0 to 100.
    """
    groups = [g for g in reward_groups(args, samples, eval=eval).values() if len(g) > 1 and None not in g]
    if not groups:
        return {}
    constant = [group[0] for group in groups if len(set(group)) == 1]
    counts = Counter(round(value, 1) + 0.0 for value in constant if value is not None)
    out = {f"zero_std/count_{value}": float(count) for value, count in sorted(counts.items())}
    out["zero_std/all_zero_percentage"] = 100.0 * constant.count(0.0) / len(groups)
    out["zero_std/all_one_percentage"] = 100.0 * constant.count(1.0) / len(groups)
    return out


def passrate_metrics(args: Any, samples: Sequence[Sample]) -> Metrics:
    """`passrate/pass@k` for k = 1, 2, 4, ... up to `--n-samples-per-prompt`, over complete groups; reward 1 passes."""
    return _under("passrate/", pass_rates(reward_groups(args, samples).values(), args.n_samples_per_prompt))


def pass_rates(groups: Iterable[Sequence[float | None]], n: int) -> Metrics:
    """`pass@k` for k = 1, 2, 4, ... up to `n`, over the groups with `n` rewards."""
    complete = [group for group in groups if len(group) == n and None not in group]
    out, k = {}, 1
    while complete and k <= n:
        out[f"pass@{k}"] = mean(pass_at_k(n, sum(r == 1 for r in group), k) for group in complete)
        k *= 2
    return out
