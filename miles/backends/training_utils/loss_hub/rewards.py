"""Group-relative rewards: centred in their group, and scaled by its standard deviation where the estimator says so."""

from __future__ import annotations

from collections.abc import Sequence
from math import sqrt
from typing import Any

from miles.backends.training_utils.loss_hub.registry import get_estimator
from miles.utils.imports import load_function
from miles.utils.types import Sample

# Rewards of a group that agree to this part of their size are the same reward with rounding noise.
_SAME_REWARD = 1e-6
_STD_EPSILON = 1e-6


def post_process_rewards(args: Any, samples: Sequence[Sample]) -> tuple[list[float], list[float]]:
    """(raw rewards, rewards that train) of a flat list of samples.

    `--custom-reward-post-process-path` `f(args, samples) -> (raw, rewards)` replaces the standard normalisation.
    """
    path = getattr(args, "custom_reward_post_process_path", None)
    if path:
        raw, rewards = load_function(path)(args, samples)
        if len(raw) != len(samples) or len(rewards) != len(samples):
            raise ValueError(
                f"--custom-reward-post-process-path {path} returned {len(raw)} raw and {len(rewards)} rewards "
                f"for {len(samples)} samples"
            )
        return list(raw), list(rewards)
    raw = [sample.get_reward_value(args) for sample in samples]
    return raw, normalize_rewards(args, samples, raw)


def normalize_rewards(args: Any, samples: Sequence[Sample], raw: Sequence[float | None]) -> list[float]:
    """Rewards as the estimator of `args` wants them, one a sample.

    A sample without a reward enters no mean. It trains on nothing, so it must have been removed (`remove_sample`).
    Raises: ValueError naming samples that have no reward and are not removed, and executions whose samples disagree.
    """
    unusable = [s.index for s, r in zip(samples, raw, strict=True) if r is None and not s.remove_sample]
    if unusable:
        raise ValueError(
            f"samples {unusable} have no reward and would still train: drop them, generate them again, or set remove_sample"
        )
    estimator = get_estimator(args.advantage_estimator)
    if not (estimator.centers_rewards and getattr(args, "rewards_normalization", True)):
        return [0.0 if r is None else float(r) for r in raw]
    scale = (
        estimator.scales_rewards
        and getattr(args, "grpo_std_normalization", True)
        and getattr(args, "n_samples_per_prompt", 2) > 1
    )
    groups = group_samples(samples, getattr(args, "n_samples_per_prompt", None))
    executions = [position if s.execution_id is None else s.execution_id for position, s in enumerate(samples)]
    return normalize_group_rewards(raw, groups, executions, divide_by_std=scale)


def group_samples(samples: Sequence[Sample], n_samples_per_prompt: int | None) -> list[Any]:
    """A group key for each sample: its `group_index` if all have one, else runs of `n_samples_per_prompt` where the
    count says so, else one group of all."""
    if all(s.group_index is not None for s in samples):
        return [s.group_index for s in samples]
    if n_samples_per_prompt and len(samples) % n_samples_per_prompt == 0:
        return [position // n_samples_per_prompt for position in range(len(samples))]
    return [0] * len(samples)


def normalize_group_rewards(
    rewards: Sequence[float | None], groups: Sequence[Any], executions: Sequence[Any], *, divide_by_std: bool
) -> list[float]:
    """(r - mean) or (r - mean) / (std + 1e-6) inside each group, each execution counted once, std with n - 1.

    A group whose rewards are all the same, up to rounding of the numbers themselves, gives exactly 0; so does a reward
    of None, and a lone one.
    Raises: ValueError where samples of one execution have different rewards.
    """
    members: dict[Any, dict[Any, float]] = {}
    for position, (reward, group, execution) in enumerate(zip(rewards, groups, executions, strict=True)):
        if reward is None:
            continue
        known = members.setdefault(group, {}).setdefault(execution, float(reward))
        if known != float(reward):
            raise ValueError(
                f"samples of execution {execution} have rewards {known} and {reward} (sample at position {position}): "
                "siblings of one execution share its reward"
            )
    moments = {group: _moments(list(of.values()), divide_by_std) for group, of in members.items()}
    out = []
    for reward, group in zip(rewards, groups, strict=True):
        if reward is None:
            out.append(0.0)
            continue
        mean, scale = moments[group]
        out.append((float(reward) - mean) * scale if scale else 0.0)
    return out


def _moments(rewards: list[float], divide_by_std: bool) -> tuple[float, float]:
    """(mean, factor) with which a group's rewards are normalised; factor 0 where they say nothing."""
    low, high = min(rewards), max(rewards)
    if high - low <= _SAME_REWARD * max(abs(low), abs(high)):
        return low, 0.0
    mean = sum(rewards) / len(rewards)
    if not divide_by_std:
        return mean, 1.0
    std = sqrt(sum((r - mean) ** 2 for r in rewards) / (len(rewards) - 1))
    return mean, 1.0 / (std + _STD_EPSILON)
