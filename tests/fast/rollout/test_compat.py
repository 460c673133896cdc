"""User functions in every shape that is promised."""

from __future__ import annotations

import threading

import pytest

from miles.rollout.base_types import (
    GenerateFnInput,
    GenerateFnOutput,
    RolloutFnConstructorInput,
    RolloutFnEvalInput,
    RolloutFnEvalOutput,
    RolloutFnTrainInput,
    RolloutFnTrainOutput,
)
from miles.rollout.compat import load_generate_function, load_rollout_function
from miles.rollout.data_source import RolloutDataSourceWithBuffer
from miles.utils.imports import ImportPathError, register_function
from miles.utils.types import Sample
from tests.fast.rollout.fakes import FakePool, make_args

INPUT = RolloutFnConstructorInput(args=make_args(""), data_source="the source")


def rollout_function(target):
    register_function("test.target", target)
    return load_rollout_function("test.target", INPUT)


class AsyncClass:
    def __init__(self, input):
        self.source = input.data_source

    async def __call__(self, input):
        return RolloutFnEvalOutput({}) if input.evaluation else RolloutFnTrainOutput([[self.source, input.rollout_id]])


class SyncClass(AsyncClass):
    def __call__(self, input):
        assert threading.current_thread() is not threading.main_thread(), "must not block the event loop"
        return RolloutFnTrainOutput([[self.source, input.rollout_id]])


async def async_function(args, rollout_id, data_source, evaluation=False):
    return {"ds": {}} if evaluation else [[data_source, rollout_id]]


def sync_function(args, rollout_id, data_source, evaluation=False):
    assert threading.current_thread() is not threading.main_thread(), "must not block the event loop"
    return RolloutFnTrainOutput([[data_source, rollout_id]])


@pytest.mark.parametrize("target", [AsyncClass, SyncClass, async_function, sync_function])
async def test_rollout_functions(target):
    output = await rollout_function(target)(RolloutFnTrainInput(3))
    assert output.samples == [["the source", 3]]


@pytest.mark.parametrize("target", [AsyncClass, async_function])
async def test_eval_functions(target):
    output = await rollout_function(target)(RolloutFnEvalInput(3))
    assert isinstance(output, RolloutFnEvalOutput)


@pytest.mark.parametrize(
    "path",
    [
        "miles.rollout.inference_rollout.InferenceRolloutFn",
        "miles.rollout.inference_rollout.inference_rollout_common.InferenceRolloutFn",
        "miles.rollout.sglang_rollout.generate_rollout",
    ],
)
async def test_the_default_under_all_its_names(run_args, path):
    args = run_args()
    source = RolloutDataSourceWithBuffer(args)
    function = load_rollout_function(path, RolloutFnConstructorInput(args, source, FakePool()))
    assert len((await function(RolloutFnTrainInput(0))).samples) == 4


async def test_a_wrong_answer_names_the_function():
    with pytest.raises(TypeError, match=r"test.target returned a NoneType; expected RolloutFnTrainOutput"):
        await rollout_function(lambda args, rollout_id, data_source, evaluation=False: None)(RolloutFnTrainInput(0))


def test_wrong_signatures_are_refused_at_startup():
    for target in (
        lambda args: None,
        lambda args, rollout_id, data_source: None,
        type("C", (), {"__init__": lambda self: None}),
    ):
        with pytest.raises(ImportPathError, match=r"test.target.* cannot be called as"):
            rollout_function(target)

    class NoCall:
        def __init__(self, input): ...

    with pytest.raises(ImportPathError, match="NoCall has no __call__"):
        rollout_function(NoCall)
    with pytest.raises(ImportPathError, match="no attribute 'nothing_here'"):
        load_rollout_function("miles.rollout.sft_rollout.nothing_here", INPUT)
    with pytest.raises(ImportPathError, match="no module named 'no_such_package'"):
        load_generate_function("no_such_package.fn")


class State:
    args = "the args"


async def generated(target, evaluation=False):
    register_function("test.generate", target)
    function = load_generate_function("test.generate")
    return (await function(GenerateFnInput(State(), Sample(index=1), {"temperature": 1}, evaluation))).samples


async def typed(input):
    input.sample.response = f"{input.args} {input.sampling_params}"
    return GenerateFnOutput(input.sample)


class TypedClass:
    async def __call__(self, input):
        return await typed(input)


async def legacy(args, sample, sampling_params):
    sample.response = f"{args} {sampling_params}"
    return sample


def legacy_sync(args, sample, sampling_params, evaluation=False):
    assert threading.current_thread() is not threading.main_thread()
    sample.response = f"{args} {sampling_params}"
    return [sample] if evaluation else sample


async def input_first(input, extra=None, more=None):
    return await typed(input)


@pytest.mark.parametrize("target", [typed, TypedClass, legacy, legacy_sync, input_first])
async def test_generate_functions(target):
    assert (await generated(target)).response == "the args {'temperature': 1}"


async def test_a_legacy_generate_function_is_told_about_evaluation():
    assert isinstance(await generated(legacy_sync, evaluation=True), list)


async def test_generate_functions_that_are_wrong():
    with pytest.raises(TypeError, match=r"test.generate returned a NoneType"):
        await generated(lambda input: None)
    with pytest.raises(ImportPathError, match="is a int, not a function"):
        await generated(3)
    with pytest.raises(ImportPathError, match="cannot be called as"):
        await generated(lambda input, second: None)
