"""One call for every reward: which function scores a sample, and what it gave."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence
from typing import Any

from miles.rollout.rm_hub.boxed import last_boxed
from miles.rollout.rm_hub.custom import call_custom, reward_loop
from miles.rollout.rm_hub.failures import (
    REWARD_CONFIG,
    REWARD_ERROR,
    REWARD_LENGTH,
    REWARD_TIMEOUT,
    REWARD_TYPE,
    RewardFailure,
    check_reward,
)
from miles.rollout.rm_hub.registry import RewardType, split_rm_type
from miles.rollout.rm_hub.remote_rm import close_sessions
from miles.rollout.rm_hub.scoring_pool import ScoringCrash, ScoringPool, ScoringTimeout
from miles.utils.imports import ImportPathError, load_function
from miles.utils.types import Sample, SampleStatus

Reward = float | dict[str, Any]

_CLOSE_TIMEOUT_S = 5.0

_pool: ScoringPool | None = None
_pool_lock = threading.Lock()


def scoring_pool(args: Any) -> ScoringPool:
    """This process's pool of `--reward-num-workers` workers, started when first asked for."""
    global _pool
    with _pool_lock:
        if _pool is None:
            _pool = ScoringPool(getattr(args, "reward_num_workers", None) or 1)
        return _pool


async def close_rewards() -> None:
    """End the scoring workers and the connections to reward servers; the next reward starts them anew."""
    global _pool
    with _pool_lock:
        pool, _pool = _pool, None
    if pool is not None:
        await asyncio.to_thread(pool.close)
    await reward_loop.close(close_sessions, _CLOSE_TIMEOUT_S)
    await close_sessions()


# ---- which reward ----------------------------------------------------------------------------------------------------


def resolve_custom_path(args: Any, sample: Sample) -> str | None:
    """The user's function for a sample: `reward_spec.custom_rm_path`, else `--custom-rm-path`."""
    own = sample.reward_spec.custom_rm_path if sample.reward_spec is not None else None
    return own or getattr(args, "custom_rm_path", None)


def resolve_rm_type(args: Any, sample: Sample) -> str | None:
    """The built-in reward: `reward_spec.rm_type`, else the row's `metadata["rm_type"]`, else `--rm-type`."""
    own = sample.reward_spec.rm_type if sample.reward_spec is not None else None
    metadata = sample.metadata if isinstance(sample.metadata, dict) else {}
    return own or metadata.get("rm_type") or getattr(args, "rm_type", None)


# ---- scoring ---------------------------------------------------------------------------------------------------------


async def async_rm(args: Any, sample: Sample, **kwargs: Any) -> Reward:
    """The reward of one sample; the sample is left as it is.

    Returns: a finite float, or the dictionary that the reward function made.
    Raises: RewardFailure, whose category says what went wrong.
    """
    path = resolve_custom_path(args, sample)
    if path is not None:
        who = f"reward {path}, sample {sample.index},"
        return check_reward(args, await _custom(path, args, sample, who, kwargs), who)
    name = resolve_rm_type(args, sample)
    if not name:
        raise RewardFailure(
            REWARD_CONFIG,
            f"sample {sample.index} has no reward: set --rm-type, --custom-rm-path, or the row's metadata['rm_type']",
            permanent=True,
        )
    try:
        reward, boxed = split_rm_type(str(name))
    except ValueError as error:
        raise RewardFailure(REWARD_CONFIG, f"sample {sample.index}: {error}", permanent=True) from None
    who = f"reward {name}, sample {sample.index},"
    response = (last_boxed(sample.response) or "") if boxed else sample.response
    return check_reward(args, await _built_in(args, reward, sample, response, who), who)


async def _custom(path: str, args: Any, target: Any, who: str, kwargs: dict[str, Any]) -> Any:
    try:
        return await call_custom(path, args, target, who, kwargs)
    except ImportPathError as error:
        raise RewardFailure(REWARD_CONFIG, str(error), permanent=True) from error


async def _built_in(args: Any, reward: RewardType, sample: Sample, response: str, who: str) -> Any:
    missing = reward.missing_package()
    if missing:
        raise RewardFailure(REWARD_CONFIG, missing, permanent=True)
    if not reward.pooled:
        return await load_function(reward.path)(args, sample, response)
    metadata = sample.metadata if reward.uses_metadata else {}
    try:
        pool = scoring_pool(args)
        return await pool.score(reward.path, response, sample.label, metadata, timeout_s=args.reward_timeout)
    except RewardFailure as failure:
        raise RewardFailure(failure.category, f"{who} {failure.message}", permanent=failure.permanent) from None
    except ScoringTimeout as error:  # a built-in reward is a pure function: the same input hangs again
        raise RewardFailure(REWARD_TIMEOUT, f"{who} {error} (--reward-timeout)", permanent=True) from None
    except ScoringCrash as error:
        raise RewardFailure(REWARD_ERROR, f"{who} {error}") from None
    except Exception as error:
        message = f"{who} raised {type(error).__name__}: {error}"
        raise RewardFailure(REWARD_ERROR, message, permanent=True) from error


async def batched_outcomes(args: Any, samples: Sequence[Sample], **kwargs: Any) -> list[Reward | RewardFailure]:
    """The reward, or the failure, of each sample.

    Samples whose custom function is the run's own (`--custom-rm-path`) go to it as one list; a sample with a
    `reward_spec` of its own, and every sample of a run with a built-in reward, is scored alone.
    """
    together = [i for i, s in enumerate(samples) if getattr(args, "custom_rm_path", None) and not _has_own_reward(s)]
    alone = [i for i in range(len(samples)) if i not in set(together)]
    outcomes: dict[int, Reward | RewardFailure] = {}

    async def one(i: int) -> None:
        try:
            outcomes[i] = await async_rm(args, samples[i], **kwargs)
        except RewardFailure as failure:
            outcomes[i] = failure

    async def list_of(indices: list[int]) -> None:
        rewards = await _call_on_list(args, [samples[i] for i in indices], kwargs)
        outcomes.update(zip(indices, rewards, strict=True))

    await asyncio.gather(*(one(i) for i in alone), *([list_of(together)] if together else []))
    return [outcomes[i] for i in range(len(samples))]


def _has_own_reward(sample: Sample) -> bool:
    return sample.reward_spec is not None and sample.reward_spec.custom_rm_path is not None


async def _call_on_list(args: Any, samples: list[Sample], kwargs: dict[str, Any]) -> list[Reward | RewardFailure]:
    path = args.custom_rm_path
    who = f"reward {path}, samples {samples[0].index} to {samples[-1].index},"
    try:
        values = await _custom(path, args, samples, who, kwargs)
        if values is not None and not isinstance(values, list | tuple) and hasattr(values, "tolist"):
            values = values.tolist()
        if not isinstance(values, list | tuple):
            raise RewardFailure(REWARD_TYPE, f"{who} returned a {type(values).__name__}, not a list of rewards")
        if len(values) != len(samples):
            raise RewardFailure(REWARD_LENGTH, f"{who} returned {len(values)} rewards for {len(samples)} samples")
    except RewardFailure as failure:
        return [failure] * len(samples)
    return [
        _checked(args, value, f"reward {path}, sample {s.index},") for value, s in zip(values, samples, strict=True)
    ]


def _checked(args: Any, value: Any, who: str) -> Reward | RewardFailure:
    try:
        return check_reward(args, value, who)
    except RewardFailure as failure:
        return failure


async def batched_async_rm(args: Any, samples: Sequence[Sample], **kwargs: Any) -> list[Reward]:
    """The rewards of several samples, in order; the samples are left as they are.

    Raises: RewardFailure, the first of the failed samples', with how many failed.
    """
    outcomes = await batched_outcomes(args, samples, **kwargs)
    failures = [outcome for outcome in outcomes if isinstance(outcome, RewardFailure)]
    if failures:
        count = f" ({len(failures)} of {len(samples)} samples failed)" if len(samples) > 1 else ""
        first = failures[0]
        raise RewardFailure(first.category, first.message + count, permanent=all(f.permanent for f in failures))
    return outcomes  # type: ignore[return-value]


# ---- scoring in place ------------------------------------------------------------------------------------------------


def _is_due(sample: Sample) -> bool:
    return sample.reward is None and sample.status in (SampleStatus.COMPLETED, SampleStatus.TRUNCATED)


async def score_sample(args: Any, sample: Sample) -> None:
    """Set the reward of a finished sample that has none, or mark it FAILED with the reward failure's category."""
    if not _is_due(sample):
        return
    try:
        sample.reward = await async_rm(args, sample)
    except RewardFailure as failure:
        sample.fail(failure.category, failure.message, permanent=failure.permanent)


async def score_group(args: Any, samples: Sequence[Sample]) -> bool:
    """The same for all samples of a group in one call (`--group-rm`), if every one of them is finished.

    Returns: whether they were scored. A group with an aborted or failed member is left as it is.
    """
    if not all(s.status in (SampleStatus.COMPLETED, SampleStatus.TRUNCATED) for s in samples):
        return False
    due = [s for s in samples if s.reward is None]
    if due:
        for sample, outcome in zip(samples, await batched_outcomes(args, samples), strict=True):
            if isinstance(outcome, RewardFailure):
                sample.fail(outcome.category, outcome.message, permanent=outcome.permanent)
            else:
                sample.reward = outcome
    return True
