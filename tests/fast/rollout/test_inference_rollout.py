"""The default rollout function: which groups make a batch, and what happens to those that do not."""

from __future__ import annotations

import asyncio
import math
import re

import pytest

from miles.backends.engine_api.errors import EngineRejected
from miles.rollout.base_types import RolloutFnConstructorInput, RolloutFnTrainInput
from miles.rollout.data_source import RolloutDataSourceWithBuffer
from miles.rollout.failures import RolloutError
from miles.rollout.filter_hub.base_types import DynamicFilterOutput
from miles.rollout.inference_rollout import InferenceRolloutFn
from miles.router.engine_pool import NoEngineError
from miles.utils.imports import register_function
from miles.utils.types import Sample, SampleStatus
from tests.fast.rollout.fakes import FakePool, write_jsonl


def build(args, pool):
    source = RolloutDataSourceWithBuffer(args)
    return InferenceRolloutFn(RolloutFnConstructorInput(args=args, data_source=source, engines=pool)), source


async def rollout(function, rollout_id=0):
    return await asyncio.wait_for(function(RolloutFnTrainInput(rollout_id)), 20)


def facts(output):
    return [[(s.index, s.tokens, s.reward, s.rollout_log_probs) for s in group] for group in output.samples]


async def test_a_batch_is_whole_groups_in_prompt_order_and_ready_to_train(run_args):
    function, _ = build(run_args(), FakePool())
    output = await rollout(function)
    assert [[s.index for s in group] for group in output.samples] == [[0, 1], [2, 3], [4, 5], [6, 7]]
    for sample in (s for group in output.samples for s in group):
        sample.validate()
        assert sample.status is SampleStatus.COMPLETED
        assert sample.reward is not None
        assert sample.version_spans[0].version == 1


async def test_the_batch_does_not_depend_on_arrival_order(run_args):
    """With a filter too: replacements are the next prompts, never whichever prompt was fastest."""
    register_function("test.keep_most", lambda args, group: sum(s.reward for s in group) > 0.8)
    args = run_args(dynamic_sampling_filter_path="test.keep_most")

    def slow_first(payload):
        return 0.02 if sum(payload["input_ids"]) % 3 == 0 else 0.0

    def slow_others(payload):
        return 0.0 if sum(payload["input_ids"]) % 3 == 0 else 0.01

    outputs = []
    for delay in (lambda p: 0.0, slow_first, slow_others):
        function, _ = build(args, FakePool(delay=delay))
        outputs.append(await rollout(function))
    assert outputs[0].metrics["rollout/dynamic_filter/drop_unnamed"] > 0
    assert facts(outputs[0]) == facts(outputs[1]) == facts(outputs[2])
    assert outputs[0].metrics == outputs[1].metrics == outputs[2].metrics


async def test_all_samples_of_a_prompt_have_seeds_of_their_own(run_args):
    pool = FakePool()
    function, _ = build(run_args(), pool)
    await rollout(function)
    await rollout(function, 1)
    seeds = [request["sampling_params"]["sampling_seed"] for request in pool.requests]
    assert len(set(seeds)) == len(seeds) == 16


async def test_a_failed_engine_call_is_retried_and_changes_nothing(run_args):
    function, _ = build(run_args(), FakePool())
    expected = facts(await rollout(function))
    failed = set()

    def fail_once(payload):
        key = payload["sampling_params"]["sampling_seed"]
        if key % 2 and key not in failed:
            failed.add(key)
            raise RuntimeError("engine returned 500")

    function, _ = build(run_args(), FakePool(before=fail_once))
    output = await rollout(function)
    assert failed
    assert facts(output) == expected


async def test_a_group_that_keeps_failing_is_dropped_counted_and_replaced(run_args):
    def broken(payload):
        if bytes(payload["input_ids"]) == poison:
            raise RuntimeError("no")

    args = run_args(max_sample_retries=1)
    probe = FakePool()
    function, _ = build(args, probe)
    await rollout(function)
    poison = bytes(probe.requests[0]["input_ids"])
    function, _ = build(args, FakePool(before=broken))
    output = await rollout(function)
    assert [group[0].group_index for group in output.samples] == [1, 2, 3, 4]
    assert output.metrics["rollout/failed_groups"] == 1
    assert output.metrics["rollout/error_cat/generation_error"] == 2


async def test_everything_failing_ends_with_the_counts(run_args):
    def broken(payload):
        raise RuntimeError("the engine is on fire")

    function, _ = build(run_args(max_sample_retries=0), FakePool(before=broken))
    with pytest.raises(RolloutError, match=r"--max-failed-group-ratio 0.5 .*(?s:.*)the engine is on fire"):
        await rollout(function)
    assert function.state.aborted is False


async def test_failures_that_come_first_do_not_end_a_rollout_that_has_enough_good_prompts(run_args):
    """Half of the prompts fail at once, the others take their time."""

    def odd(payload):
        if payload["input_ids"][-1] % 2:
            raise EngineRejected("no", 400)

    pool = FakePool(before=odd, delay=lambda payload: 0.02)
    output = await rollout(build(run_args(), pool)[0])
    assert output.metrics["rollout/failed_groups"] >= 3
    assert len(output.samples) == 4


async def test_no_engine_left_ends_the_rollout_at_once(run_args):
    def gone(payload):
        raise NoEngineError("no engine has served for 900 s")

    pool = FakePool(before=gone)
    function, _ = build(run_args(), pool)
    with pytest.raises(NoEngineError, match="900 s"):
        await rollout(function)
    assert len(pool.requests) <= 8, "nobody may wait for the engines again"


async def test_a_request_that_the_engine_refuses_is_not_repeated(run_args):
    def refuse(payload):
        if payload["input_ids"] == first:
            raise EngineRejected("input too long", 400)

    probe = FakePool()
    await rollout(build(run_args(), probe)[0])
    first = probe.requests[0]["input_ids"]
    pool = FakePool(before=refuse)
    output = await rollout(build(run_args(), pool)[0])
    assert [r["input_ids"] for r in pool.requests].count(first) == 2
    assert output.metrics["rollout/failed_groups"] == 1


async def test_a_data_source_that_breaks_its_promises_is_named(run_args):
    function, source = build(run_args(), FakePool())
    good = source.get_samples
    for broken, message in (
        (lambda n: [], "returned no groups"),
        (lambda n: [group[:1] for group in good(n)], "gave a group of 1 samples; --n-samples-per-prompt is 2"),
        (lambda n: [[Sample(prompt="x")] * 2], "without index or group_index"),
    ):
        source.get_samples = broken
        with pytest.raises(RolloutError, match=message):
            await rollout(function)


async def test_everything_filtered_ends_with_the_reasons(run_args):
    register_function("test.drop_all", lambda args, group: DynamicFilterOutput(keep=False, reason="too_easy"))
    function, _ = build(run_args(dynamic_sampling_filter_path="test.drop_all"), FakePool())
    with pytest.raises(RolloutError, match=r"only 0 of 4 groups were kept after 256 .*too_easy 256.*test.drop_all"):
        await rollout(function)


async def test_a_reward_that_raises_never_becomes_zero(run_args):
    async def reward(args, sample, **kwargs):
        if sample.group_index == 1:
            raise ValueError("verifier broke")
        return 1.0

    register_function("test.sometimes", reward)
    function, _ = build(run_args(custom_rm_path="test.sometimes"), FakePool())
    output = await rollout(function)
    assert [group[0].group_index for group in output.samples] == [0, 2, 3, 4]
    assert all(s.reward == 1.0 for group in output.samples for s in group)
    assert output.metrics["rollout/failed_groups"] == 1


def long_tail(payload):
    """The third prompt takes very long."""
    return 0.5 if bytes(payload["input_ids"]).endswith(LAST_OF_THIRD) else 0.001


LAST_OF_THIRD = b""


async def over_sampled(run_args, **overrides):
    """Six groups requested for a batch of four, the third one slow."""
    global LAST_OF_THIRD
    args = run_args(over_sampling_batch_size=6, **overrides)
    probe = FakePool()
    await rollout(build(args, probe)[0])
    LAST_OF_THIRD = bytes(probe.requests[4]["input_ids"])
    pool = FakePool(delay=long_tail)
    function, source = build(args, pool)
    return await rollout(function), source, pool, function


async def test_over_sampling_does_not_wait_for_the_slow_prompt(run_args):
    output, source, pool, function = await over_sampled(run_args)
    assert 2 not in [group[0].group_index for group in output.samples]
    assert len(output.samples) == 4
    assert pool.aborts >= 1
    assert output.metrics["rollout/over_sampling/cut_groups"] == 2
    assert source.get_buffer_length() == 0
    assert function.state.aborted is False


async def test_a_partial_rollout_goes_on_where_it_was_cut(run_args):
    flags = {"partial_rollout": True, "mask_offpolicy_in_partial_rollout": True}
    output, source, pool, function = await over_sampled(run_args, **flags)
    recycled = [group[0].group_index for group in source.buffer]
    assert 2 in recycled
    assert len(recycled) == output.metrics["rollout/partial_rollout/recycled_groups"] == 2
    kept = {s.index for group in output.samples for s in group}
    assert kept.isdisjoint(s.index for group in source.buffer for s in group)

    sample = next(s for group in source.buffer for s in group if s.group_index == 2)
    before = list(sample.tokens)
    done = sample.response_length
    pool.delay, pool.version = (lambda payload: 0.0), 2
    output = await rollout(function, 1)
    sample = next(s for group in output.samples for s in group if s.group_index == 2)
    sample.validate()
    assert sample.tokens[: len(before)] == before
    if done:
        assert sample.metadata["start_rollout_id"] == 0
        assert sample.loss_mask == [0] * done + [1] * (sample.response_length - done)
        assert [span.version for span in sample.version_spans] == [1, 2]


async def test_an_engine_that_cuts_a_request_off_is_asked_for_the_rest(run_args):
    """A pause that aborts in mid-rollout: the tokens so far stay, mask and log-probs in step."""
    pool = FakePool(delay=lambda payload: 0.01)
    function, _ = build(run_args(), pool)
    task = asyncio.create_task(rollout(function))
    while len(pool.requests) < 8:
        await asyncio.sleep(0.001)
    await asyncio.sleep(0.025)
    await pool.abort_all()
    pool.version = 2
    output = await task
    uncut = facts(await rollout(build(run_args(), FakePool())[0]))
    for group, expected in zip(output.samples, uncut, strict=True):
        for sample, (index, tokens, _, _) in zip(group, expected, strict=True):
            sample.validate()
            assert sample.index == index
            assert sample.status is SampleStatus.COMPLETED
            assert sample.tokens[: len(tokens)] == tokens
            assert {span.version for span in sample.version_spans} == {1, 2}


async def test_a_group_reward_sees_the_whole_group_once(run_args):
    calls = []

    async def group_reward(args, samples, **kwargs):
        calls.append([s.index for s in samples])
        return [float(i) for i in range(len(samples))]

    register_function("test.group_reward", group_reward)
    function, _ = build(run_args(custom_rm_path="test.group_reward", group_rm=True), FakePool())
    output = await rollout(function)
    assert sorted(calls) == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert [[s.reward for s in group] for group in output.samples] == [[0.0, 1.0]] * 4


async def test_executions_that_fan_out_share_one_rollout_id_and_one_reward_call(run_args):
    import copy

    async def reward(args, samples, **kwargs):
        assert [s.rollout_id for s in samples] == [samples[0].index] * 2
        return [1.0] * len(samples)

    register_function("test.list_reward", reward)

    async def split(args, sample, sampling_params):
        sample.tokens, sample.response_length, sample.status = [1, 2, 3], 2, SampleStatus.COMPLETED
        return [copy.deepcopy(sample), copy.deepcopy(sample)]

    register_function("test.split", split)
    function, _ = build(
        run_args(custom_generate_function_path="test.split", custom_rm_path="test.list_reward"), FakePool()
    )
    output = await rollout(function)
    execution = output.samples[1][0]
    assert len(execution) == 2
    assert {s.rollout_id for s in execution} == {execution[0].index} == {2}


async def broken_verifier(args, sample):
    return float({}["verdict"])


async def endless(args, sample):
    await asyncio.sleep(1e6)


@pytest.mark.parametrize(
    ("reward", "said", "way_out"),
    [
        (lambda args, sample: None, "returned None", "about reward_none: return a number on every path"),
        (lambda args, sample: math.nan, "returned nan", "about reward_nan: return a finite number"),
        (
            broken_verifier,
            r"raised KeyError: 'verdict' \(test_inference_rollout.py line \d+, in broken_verifier\)",
            "about reward_error: make the reward function",
        ),
        (endless, r"did not answer within 0.3 s \(--reward-timeout\)", "about reward_timeout: raise --reward-timeout"),
    ],
)
async def test_a_reward_that_is_no_number_stops_the_run_with_its_name_the_sample_and_a_way_out(
    run_args, reward, said, way_out
):
    register_function("test.no_number", reward)
    args = run_args(custom_rm_path="test.no_number", reward_timeout=0.3, max_sample_retries=0)
    with pytest.raises(RolloutError) as error:
        await rollout(build(args, FakePool())[0])
    text = str(error.value)
    assert re.search(rf"\n  reward_\w+: reward test.no_number, sample \d+, {said}", text), text
    assert f"What to do {way_out}" in text


async def test_prompts_beyond_the_models_context_are_replaced_or_end_the_run_with_the_length_to_set(run_args, tmp_path):
    rows = [{"input": "x" * (600 if i == 1 else 5), "label": ""} for i in range(12)]
    args = run_args(prompt_data=write_jsonl(tmp_path / "some.jsonl", rows))
    output = await rollout(build(args, FakePool())[0])
    assert [group[0].index for group in output.samples] == [0, 4, 6, 8]
    assert output.metrics["rollout/error_cat/prompt_too_long"] == 2.0
    args = run_args(prompt_data=write_jsonl(tmp_path / "all.jsonl", [rows[1]] * 12))
    with pytest.raises(RolloutError) as error:
        await rollout(build(args, FakePool())[0])
    assert (
        "\n  prompt_too_long: sample 0: a prompt of 600 tokens leaves no room for a response in a context of 512; "
        "--rollout-max-prompt-len 511 leaves such prompts out\n" in str(error.value)
    )


async def test_groups_with_a_sample_that_has_no_reward_are_replaced_and_never_scored_zero(run_args):
    register_function("test.some_none", lambda args, sample: None if sample.index == 3 else 1.0)
    args = run_args(custom_rm_path="test.some_none", max_sample_retries=0)
    output = await rollout(build(args, FakePool())[0])
    assert [[s.index for s in group] for group in output.samples] == [[0, 1], [4, 5], [6, 7], [8, 9]]
    assert {s.reward for group in output.samples for s in group} == {1.0}
    assert output.metrics["rollout/error_cat/reward_none"] == output.metrics["rollout/failed_groups"] == 1.0


async def test_a_generate_function_may_score_by_itself(run_args):
    async def scored(args, sample, sampling_params):
        sample.tokens, sample.response_length, sample.status = [1, 2, 3], 2, SampleStatus.COMPLETED
        sample.reward = 0.25
        return sample

    register_function("test.scored", scored)
    args = run_args(custom_generate_function_path="test.scored", custom_rm_path=None)
    output = await rollout(build(args, FakePool())[0])
    assert [s.reward for group in output.samples for s in group] == [0.25] * 8


async def test_sample_hooks_see_the_batch_and_all_finished_groups(run_args):
    seen = {}

    def remove_first(args, data):
        data[0][0].remove_sample = True

    def everything(args, samples, get_samples):
        seen["groups"], seen["next"] = len(samples), get_samples(1)[0][0].prompt

    register_function("test.remove_first", remove_first)
    register_function("test.everything", everything)
    register_function("test.drop_group_1", lambda args, group: group[0].group_index != 1)
    args = run_args(
        rollout_sample_filter_path="test.remove_first",
        rollout_all_samples_process_path="test.everything",
        dynamic_sampling_filter_path="test.drop_group_1",
    )
    output = await rollout(build(args, FakePool())[0])
    assert output.samples[0][0].remove_sample
    assert seen == {"groups": 5, "next": "question 5"}, "the third argument draws further prompts"
