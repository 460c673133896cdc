"""The rollout side on its real parts: arguments, data, an embedded engine in its own process, the pool, rewards."""

from __future__ import annotations

import asyncio

import pytest

from miles.arguments import make_args
from miles.backends.embedded_engine.launch import launch
from miles.backends.engine_api.client import EngineClient
from miles.backends.engine_api.launcher import wait_ready
from miles.rollout.base_types import RolloutFnConstructorInput, RolloutFnEvalInput, RolloutFnTrainInput
from miles.rollout.data_source import RolloutDataSourceWithBuffer
from miles.rollout.inference_rollout import InferenceRolloutFn
from miles.rollout.postprocess import postprocess_rollout
from miles.rollout.rm_hub import close_rewards
from miles.rollout.train_data import convert_samples_to_train_data
from miles.router.engine_pool import EnginePool
from miles.utils.process import terminate
from miles.utils.types import SampleStatus
from tests.fast.rollout.fakes import prompt_rows, write_jsonl
from tests.helpers.tiny_models import make_tiny_model


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return make_tiny_model(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def engine(model, tmp_path_factory):
    args = make_args(check=False, hf_checkpoint=str(model), train_device="cpu")
    started = launch(
        args, index=0, host="127.0.0.1", port=0, admin_key="k", model_path=str(model),
        log_path=tmp_path_factory.mktemp("log") / "engine.log", weight_version=3,
    )  # fmt: skip
    yield started
    terminate(started.process)


@pytest.fixture
async def build(model, engine, tmp_path):
    """A rollout function over the engine; every call builds all client-side parts anew."""
    clients = []

    async def make(**overrides):
        fields = {
            "hf_checkpoint": str(model),
            "prompt_data": write_jsonl(tmp_path / "p.jsonl", prompt_rows(40)),
            "label_key": "label",
            "apply_chat_template": True,
            "rollout_batch_size": 6,
            "n_samples_per_prompt": 3,
            "rollout_max_response_len": 12,
            "num_rollout": 1,
            "custom_rm_path": "tests.helpers.rewards.even_token_share",
            "run_dir": str(tmp_path / "run"),
        }
        args = make_args(check=False, **{**fields, **overrides})
        pool = EnginePool(args)
        client = EngineClient(engine.url, admin_key="k")
        await wait_ready(client, engine, 60)
        pool.set_engine(0, client)
        clients.append(client)
        source = RolloutDataSourceWithBuffer(args)
        return args, InferenceRolloutFn(RolloutFnConstructorInput(args, source, pool)), source

    yield make
    for client in clients:
        await client.close()
    await close_rewards()


def flat(output):
    return [s for group in output.samples for s in group]


async def test_a_batch_from_the_engine_trains_and_is_the_same_again(build):
    outputs = []
    for _ in range(2):
        args, function, _ = await build()
        outputs.append(await function(RolloutFnTrainInput(0)))
    samples, metadata = postprocess_rollout(args, outputs[0].samples)
    columns = convert_samples_to_train_data(args, samples, metadata)
    assert len(columns["tokens"]) == 18
    assert all(
        spans == [(3, 0, n)] for spans, n in zip(columns["version_spans"], columns["response_lengths"], strict=True)
    )
    assert len({tuple(s.tokens) for s in samples}) == 18, "samples of one prompt differ"
    again = flat(outputs[1])
    assert [s.tokens for s in samples] == [s.tokens for s in again]
    assert [s.rollout_log_probs for s in samples] == [s.rollout_log_probs for s in again], "bit for bit"
    tokenizer = function.state.tokenizer
    for sample in samples:
        assert sample.response == tokenizer.decode(sample.tokens[-sample.response_length :])


async def test_over_sampling_with_partial_rollout_on_the_engine(build):
    flags = {
        "over_sampling_batch_size": 12,
        "rollout_batch_size": 2,
        "partial_rollout": True,
        "rollout_max_response_len": 400,
    }
    args, function, source = await build(**flags, mask_offpolicy_in_partial_rollout=True)
    output = await asyncio.wait_for(function(RolloutFnTrainInput(0)), 60)
    assert len(output.samples) == 2
    assert source.get_buffer_length() == 10
    partial = [s for group in source.buffer for s in group if s.status is SampleStatus.ABORTED and s.response_length]
    for sample in (s for group in source.buffer for s in group):
        sample.validate()
    before = {s.index: list(s.tokens) for s in partial}
    args.over_sampling_batch_size, args.rollout_batch_size = None, 10
    output = await asyncio.wait_for(function(RolloutFnTrainInput(1)), 120)
    assert source.get_buffer_length() == 0
    for sample in flat(output):
        sample.validate()
        if sample.index in before:
            old = before[sample.index]
            assert sample.tokens[: len(old)] == old
            assert 0 in sample.loss_mask and 1 in sample.loss_mask


async def test_a_partial_sample_goes_on_as_if_it_had_not_been_cut(build):
    """Random numbers belong to positions, so a cut under unchanged weights changes nothing."""
    _, function, _ = await build(rollout_max_response_len=200)
    task = asyncio.create_task(function(RolloutFnTrainInput(0)))
    while function.engines.load(0) < 18:
        await asyncio.sleep(0.005)
    await asyncio.sleep(0.05)
    await function.engines.abort_all()
    cut = await asyncio.wait_for(task, 60)
    assert any(len(s.weight_versions) > 1 for s in flat(cut)), "nothing was cut: the test proves nothing"
    _, function, _ = await build(rollout_max_response_len=200)
    whole = await function(RolloutFnTrainInput(0))
    assert [s.tokens for s in flat(cut)] == [s.tokens for s in flat(whole)]
    assert [s.rollout_log_probs for s in flat(cut)] == [s.rollout_log_probs for s in flat(whole)]


async def test_evaluation_on_the_engine(build, tmp_path):
    data = write_jsonl(tmp_path / "e.jsonl", prompt_rows(3))
    _, function, _ = await build(eval_prompt_data=["mine", data], n_samples_per_eval_prompt=2, eval_temperature=0.0)
    output = await function(RolloutFnEvalInput(0))
    rewards = output.data["mine"]["rewards"]
    assert len(rewards) == 6
    assert rewards[::2] == rewards[1::2], "greedy samples of one prompt agree"
