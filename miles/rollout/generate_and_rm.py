"""One sample, one group: generate, score, retry what failed. Nothing here ever turns a failure into a reward."""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from miles.rollout.base_types import GenerateFnInput
from miles.rollout.compat import GenerateFn
from miles.rollout.failures import FINAL, failure_category, flatten, is_fatal, is_permanent
from miles.rollout.generate_state import GenerateState
from miles.rollout.rm_hub import RewardFailure, async_rm, batched_outcomes
from miles.utils.seeds import derive_seed
from miles.utils.types import Group, Sample, SampleStatus

logger = logging.getLogger(__name__)

_STICKY_POLICIES = ("manual", "consistent_hashing")
_RETRY_PAUSE_S = 0.5

Execution = Sample | list[Sample]


async def generate_and_rm(
    state: GenerateState, sample: Sample, sampling_params: dict[str, Any], evaluation: bool = False
) -> Execution:
    """Generate one sample and score it; a finished one is only scored if it has no reward yet.

    Returns: the sample, or the list that its generate function made of it. Whatever goes wrong comes back as status
    FAILED with a `Failure`; ABORTED means that the batch was cut off (or the engine was) and can be resumed.
    Raises: only what ends the run, such as NoEngineError.
    """
    result: Execution = sample
    if sample.status not in FINAL:
        async with state.generate_fn_semaphore:
            if state.aborted:
                sample.status = SampleStatus.ABORTED
                return sample
            result = await _generate(state, sample, sampling_params, evaluation)
    if not getattr(state.args, "group_rm", False):
        await _score(state, result)
    return result


async def _generate(state: GenerateState, sample: Sample, params: dict[str, Any], evaluation: bool) -> Execution:
    function: GenerateFn = state.generate_function_for(sample.generate_function_path)
    try:
        output = await function(GenerateFnInput(state, sample, dict(params), evaluation))
        return _adopt(sample, output.samples)
    except Exception as error:
        if is_fatal(error):
            raise
        logger.debug("sample %s failed to generate", sample.index, exc_info=True)
        category = failure_category(error, "generation_error")
        sample.fail(category, _naming(sample, _text(error)), permanent=is_permanent(error))
        return sample


def _text(error: Exception) -> str:
    if str(error) and hasattr(error, "category"):  # an error of ours, written to be read
        return str(error)
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__


def _naming(sample: Sample, text: str) -> str:
    """The text, with the sample's name in front where it does not have it."""
    return text if re.search(rf"\bsample {sample.index}\b", text) else f"sample {sample.index}: {text}"


def _adopt(source: Sample, result: Execution) -> Execution:
    """Give the samples of one execution their common identity, where the generate function left it out."""
    if isinstance(result, Sample):
        return result
    if not result:
        source.fail("empty_output", f"sample {source.index}: the generate function returned no samples")
        return source
    shared = None
    if len(result) > 1 and all(s.rollout_id is None for s in result):
        shared = source.index
    for sample in result:
        sample.rollout_id = shared if shared is not None else sample.rollout_id
        sample.group_index = source.group_index if sample.group_index is None else sample.group_index
        sample.index = source.index if sample.index is None else sample.index
    return result


# ---- rewards ---------------------------------------------------------------------------------------------------------


async def _score(state: GenerateState, result: Execution) -> None:
    """Score what one execution gave, if all of it is finished: one sample alone, several in one call."""
    samples = flatten([result])
    missing = [s for s in samples if s.reward is None]
    if not missing or any(s.status not in FINAL for s in samples):
        return
    if isinstance(result, Sample):
        await _ask_for_rewards(state, missing, lambda: _outcome(state.args, result))
    else:
        await _ask_for_rewards(state, missing, lambda: batched_outcomes(state.args, missing))


async def _score_group(state: GenerateState, group: list[Execution]) -> None:
    """Score a whole group in one call (`--group-rm`), if every sample of it is finished."""
    samples = flatten(group)
    if any(s.status not in FINAL for s in samples) or all(s.reward is not None for s in samples):
        return
    await _ask_for_rewards(state, samples, lambda: batched_outcomes(state.args, samples))


async def _outcome(args: Any, sample: Sample) -> list[Any]:
    try:
        return [await async_rm(args, sample)]
    except RewardFailure as failure:
        return [failure]


async def _ask_for_rewards(
    state: GenerateState, samples: list[Sample], ask: Callable[[], Awaitable[Sequence[Any]]]
) -> None:
    """Set the rewards that `ask` gives; ask again where it failed. The responses stay: only the reward is in question.

    What has no reward in the end is FAILED, for good: generating again would not help the reward function.
    """
    outcomes: Sequence[Any] = []
    for attempt in range(_attempts(state)):
        if attempt:
            await asyncio.sleep(_RETRY_PAUSE_S * attempt)
        outcomes = await ask()
        failures = [outcome for outcome in outcomes if isinstance(outcome, RewardFailure)]
        if all(failure.permanent for failure in failures):
            break
    for sample, outcome in zip(samples, outcomes, strict=True):
        if isinstance(outcome, RewardFailure):
            sample.fail(outcome.category, _naming(sample, outcome.message), permanent=True)
        else:
            sample.reward = outcome


# ---- groups ----------------------------------------------------------------------------------------------------------


def _attempts(state: GenerateState) -> int:
    return 1 + max(0, getattr(state.args, "max_sample_retries", 2))


def sample_seed(args: Any, sample: Sample) -> int:
    """The seed of a sample's random numbers: of its place in the run, never of when or where it is generated."""
    return derive_seed(args.rollout_seed, "sample", sample.index)  # type: ignore[arg-type]


def prepare_group(state: GenerateState, group: Group) -> None:
    """Routing keys, for router policies that keep a sample's calls on one engine."""
    if getattr(state.args, "sglang_router_policy", None) in _STICKY_POLICIES:
        for sample in group:
            sample.routing_key = sample.routing_key or f"sample-{sample.index}"


async def run_sample(
    state: GenerateState, sample: Sample, sampling_params: dict[str, Any], evaluation: bool = False
) -> Execution:
    """`generate_and_rm` until the sample is final, at most 1 + `--max-sample-retries` times.

    A failed one starts over with the same seed; one that an engine cut off goes on from the tokens that it has.
    """
    result: Execution = sample
    for attempt in range(_attempts(state)):
        if attempt:
            await asyncio.sleep(_RETRY_PAUSE_S * attempt)
        result = await generate_and_rm(state, sample, sampling_params, evaluation)
        unfinished = [s for s in flatten([result]) if s.status not in FINAL]
        if not unfinished or state.aborted or any(s.failure and s.failure.permanent for s in unfinished):
            break
        if attempt + 1 == _attempts(state):
            _give_up(unfinished)
        elif isinstance(result, list) or unfinished[0].status is SampleStatus.FAILED:
            sample.reset_for_retry()
    return result


def _give_up(unfinished: list[Sample]) -> None:
    for sample in unfinished:
        if sample.status is not SampleStatus.FAILED:
            sample.fail("aborted", f"sample {sample.index}: the engine cut it off again and again")


async def generate_and_rm_group(
    state: GenerateState,
    group: Group,
    sampling_params: dict[str, Any],
    evaluation: bool = False,
    *,
    seeds: Sequence[int] | None = None,
) -> list[Execution]:
    """Generate and score the samples of one prompt, concurrently; group rewards once all are there.

    Each sample gets its own `sampling_seed`: from `seeds`, else from its index in the run. Failures stay on the samples; an exception that is not a sample's own
    (cancellation, no engine left) cancels the siblings, waits for them, and is raised.
    """
    prepare_group(state, group)
    tasks = []
    for sample, seed in zip(group, seeds or [sample_seed(state.args, s) for s in group], strict=True):
        params = {**sampling_params, "sampling_seed": seed}
        tasks.append(asyncio.create_task(run_sample(state, sample, params, evaluation)))
    try:
        results = list(await asyncio.gather(*tasks))
    except BaseException:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        raise
    if getattr(state.args, "group_rm", False):
        await _score_group(state, results)
    return results
