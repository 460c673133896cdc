"""Users' reward functions: what they may return, and what becomes of the ones that raise, hang, block or say nothing."""

import asyncio
import functools
import math
import sys
import threading
import time

import numpy as np
import pytest
import torch

from miles.rollout.rm_hub import RewardFailure, async_rm, batched_async_rm, score_group, score_sample
from miles.utils.types import RewardSpec, SampleStatus

from .conftest import finished


async def half(args, sample):
    await asyncio.sleep(0)
    return 0.5


def half_sync(args, sample, **kwargs):
    return 0.5


class Half:
    async def __call__(self, args, sample):
        return 0.5


@pytest.mark.parametrize("function", [half, half_sync, Half(), functools.partial(half), lambda a, s: half(a, s)])
async def test_any_kind_of_callable_scores(args, custom, function):
    custom(function)
    assert await async_rm(args, finished()) == 0.5


@pytest.mark.parametrize("value", [1, 1.0, True, np.float32(1), np.int64(1), np.array([1.0]), torch.tensor(1.0)])
async def test_any_kind_of_number_is_a_float(args, custom, value):
    custom(lambda args, sample: value)
    reward = await async_rm(args, finished())
    assert reward == 1.0 and type(reward) is float


async def test_keywords_reach_the_function(args, custom):
    custom(lambda args, sample, *, bonus=0: sample.index + bonus)
    assert await async_rm(args, finished(index=3), bonus=0.5) == 3.5


async def test_dictionaries_need_a_key_that_holds_a_number(args, custom):
    custom(lambda args, sample: {"score": 1, "style": "terse"})
    with pytest.raises(RewardFailure, match="set --reward-key"):
        await async_rm(args, finished())
    args.reward_key = "score"
    assert await async_rm(args, finished()) == {"score": 1.0, "style": "terse"}
    args.reward_key = "points"
    with pytest.raises(RewardFailure, match="no 'points'"):
        await async_rm(args, finished())
    args.reward_key = "style"
    with pytest.raises(RewardFailure, match="'terse'"):
        await async_rm(args, finished())


async def test_with_a_post_process_hook_any_answer_but_none_passes(args, custom):
    custom(lambda args, sample: {"teacher": [1, 2]})
    args.custom_reward_post_process_path = "some.hook"
    assert await async_rm(args, finished()) == {"teacher": [1, 2]}
    custom(lambda args, sample: None)
    with pytest.raises(RewardFailure):
        await async_rm(args, finished())


def raises(args, sample):
    raise KeyError("column")


def raises_timeout(args, sample):
    raise TimeoutError("my own server")


def exits(args, sample):
    sys.exit(3)


async def exits_async(args, sample):
    sys.exit(3)


async def cancels_itself(args, sample):
    raise asyncio.CancelledError


async def hangs(args, sample):
    await asyncio.sleep(1e6)


def hangs_in_a_thread(args, sample):
    time.sleep(1e6)


async def blocks(args, sample):
    time.sleep(1e6)


@pytest.mark.parametrize(
    "function, category, message",
    [
        (raises, "reward_error", "KeyError: 'column'"),
        (raises_timeout, "reward_error", "my own server"),
        (exits, "reward_error", "SystemExit"),
        (exits_async, "reward_error", "SystemExit"),
        (cancels_itself, "reward_error", "cancelled itself"),
        (hangs, "reward_timeout", "within 0.5 s"),
        (hangs_in_a_thread, "reward_timeout", "within 0.5 s"),
        (blocks, "reward_timeout", "blocked its event loop"),
        (lambda a, s: None, "reward_none", "returned None"),
        (lambda a, s: math.nan, "reward_nan", "returned nan"),
        (lambda a, s: -math.inf, "reward_nan", "returned -inf"),
        (lambda a, s: "1.0", "reward_type", "returned a str"),
        (lambda a, s: [1.0], "reward_type", "returned a list"),
        (lambda a, s: np.ones(2), "reward_type", "returned a ndarray"),
    ],
)
async def test_what_goes_wrong_fails_the_sample_by_name_and_is_never_a_reward(
    args, custom, function, category, message
):
    custom(function)
    args.reward_timeout = 0.5
    sample = finished(index=9)
    await score_sample(args, sample)
    assert sample.status is SampleStatus.FAILED and sample.reward is None
    assert sample.failure.category == category
    assert message in sample.failure.message and "sample 9" in sample.failure.message
    custom(half)
    other = finished()
    await score_sample(args, other)
    assert other.reward == 0.5, "the next sample is scored as if nothing had been"


async def test_a_call_that_blocks_fails_alone_and_those_behind_it_start_again(args, custom):
    async def reward(args, sample):
        await asyncio.sleep(0.01)
        if sample.index == 3:
            time.sleep(1e6)
        await asyncio.sleep(0.05)
        return float(sample.index)

    custom(reward)
    args.reward_timeout = 1.0
    samples = [finished(index=i) for i in range(8)]
    await asyncio.gather(*(score_sample(args, s) for s in samples))
    assert [s.index for s in samples if s.status is SampleStatus.FAILED] == [3]
    assert [s.reward for s in samples if s.index != 3] == [0, 1, 2, 4, 5, 6, 7]


async def test_a_late_rollout_loop_times_nothing_out(args, custom):
    """The loop that asks is held up for longer than a reward may take: no reward's fault."""
    custom(half)
    args.reward_timeout = 0.4
    scoring = [asyncio.create_task(async_rm(args, finished(index=i))) for i in range(200)]
    await asyncio.sleep(0.01)
    time.sleep(1.0)
    assert await asyncio.gather(*scoring) == [0.5] * 200


async def test_200_slow_plain_functions_time_out_none_while_they_wait_for_a_thread(args, custom):
    def slow(args, sample):
        time.sleep(0.05)
        return 1.0

    custom(slow)
    args.reward_timeout = 1.0
    before = threading.active_count()
    assert await asyncio.gather(*(async_rm(args, finished(index=i)) for i in range(200))) == [1.0] * 200
    await asyncio.sleep(0.1)
    assert threading.active_count() <= before + 2


async def test_a_cancelled_caller_cancels_the_function(args, custom):
    ended = threading.Event()

    async def reward(args, sample):
        try:
            await asyncio.sleep(1e6)
        finally:
            ended.set()

    custom(reward)
    scoring = asyncio.create_task(async_rm(args, finished()))
    await asyncio.sleep(0.2)
    scoring.cancel()
    with pytest.raises(asyncio.CancelledError):
        await scoring
    assert await asyncio.to_thread(ended.wait, 5)


# ---- lists -----------------------------------------------------------------------------------------------------------


async def test_a_list_goes_to_the_function_at_once(args, custom):
    calls = []

    async def reward(args, samples):
        calls.append([s.index for s in samples])
        return [s.index / 10 for s in samples]

    custom(reward)
    assert await batched_async_rm(args, [finished(index=i) for i in range(4)]) == [0, 0.1, 0.2, 0.3]
    assert calls == [[0, 1, 2, 3]]
    custom(lambda args, samples: np.arange(3.0))
    assert await batched_async_rm(args, [finished(index=i) for i in range(3)]) == [0, 1, 2]


async def test_a_samples_own_function_is_respected_in_a_list(args, custom):
    own = custom(lambda args, sample: 7.0, "custom_reward.own")
    custom(lambda args, samples: [1.0] * len(samples))
    samples = [finished(index=i) for i in range(3)]
    samples[1].reward_spec = RewardSpec(custom_rm_path=own)
    assert await batched_async_rm(args, samples) == [1, 7, 1]


@pytest.mark.parametrize(
    "answer, category",
    [
        (lambda a, s: [1.0], "reward_length"),
        (lambda a, s: 1.0, "reward_type"),
        (lambda a, s: None, "reward_type"),
        (lambda a, s: [1.0, None, 1.0], "reward_none"),
        (lambda a, s: [1.0, math.nan, 1.0], "reward_nan"),
    ],
)
async def test_lists_that_do_not_fit_fail_by_name(args, custom, answer, category):
    custom(answer)
    with pytest.raises(RewardFailure) as caught:
        await batched_async_rm(args, [finished(index=i) for i in range(3)])
    assert caught.value.category == category


async def test_one_bad_entry_of_a_group_fails_that_sample_and_scores_the_others(args, custom):
    custom(lambda args, samples: [1.0, None, 0.0])
    group = [finished(index=i) for i in range(3)]
    assert await score_group(args, group)
    assert [s.reward for s in group] == [1.0, None, 0.0]
    assert [s.status.value for s in group] == ["completed", "failed", "completed"]


async def test_a_group_with_an_unfinished_member_is_left_for_later(args, custom):
    custom(lambda args, samples: [1.0] * len(samples))
    group = [finished(index=i) for i in range(3)]
    group[2].status = SampleStatus.ABORTED
    assert not await score_group(args, group)
    assert [s.reward for s in group] == [None] * 3


# ---- which reward ----------------------------------------------------------------------------------------------------


async def test_the_first_reward_that_is_named_wins(args, custom):
    args.rm_type = "f1"
    sample = finished("cat", "cat", metadata={"rm_type": "dapo"})
    with pytest.raises(RewardFailure, match="reward dapo"):  # of the row: gives a dictionary, and no key is set
        await async_rm(args, sample)
    sample.reward_spec = RewardSpec(rm_type="boxed_f1")
    assert await async_rm(args, sample) == 0.0
    run_wide = custom(lambda args, sample: 3.0)
    assert await async_rm(args, sample) == 3.0
    sample.reward_spec = RewardSpec(custom_rm_path=custom(lambda args, sample: 4.0, "custom_reward.own"))
    args.custom_rm_path = run_wide
    assert await async_rm(args, sample) == 4.0


async def test_no_reward_or_an_unknown_one_fails_and_says_what_there_is(args):
    with pytest.raises(RewardFailure, match="set --rm-type") as caught:
        await async_rm(args, finished())
    assert caught.value.category == "reward_config" and caught.value.permanent
    args.rm_type = "maths"
    with pytest.raises(RewardFailure, match="did you mean math"):
        await async_rm(args, finished())
    args.custom_rm_path = "no_such_package.reward"
    with pytest.raises(RewardFailure, match="no module named 'no_such_package'"):
        await async_rm(args, finished())


@pytest.mark.parametrize("status", [SampleStatus.PENDING, SampleStatus.ABORTED, SampleStatus.FAILED])
async def test_unfinished_samples_are_not_scored(args, custom, status):
    custom(half)
    sample = finished()
    sample.status = status
    await score_sample(args, sample)
    assert sample.reward is None and sample.status is status


async def test_a_reward_that_is_there_stays(args, custom):
    custom(half)
    sample = finished(reward=0.25)
    await score_sample(args, sample)
    assert sample.reward == 0.25
