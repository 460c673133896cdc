"""Every example of docs/customize.md is run, so that the page cannot promise what does not work."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml

from miles.arguments.rules.hooks import HOOKS
from miles.rollout.base_types import RolloutFnConstructorInput, RolloutFnEvalInput, RolloutFnTrainInput
from miles.rollout.compat import load_rollout_function
from miles.rollout.data_source import RolloutDataSourceWithBuffer
from miles.rollout.eval_config import load_eval_configs
from miles.rollout.inference_rollout import InferenceRolloutFn
from miles.rollout.postprocess import postprocess_rollout
from miles.rollout.train_data import convert_samples_to_train_data
from miles.utils.imports import register_function
from tests.fast.rollout.fakes import FakePool, make_args

PAGE = (Path(__file__).parents[3] / "docs" / "customize.md").read_text()


@pytest.fixture(scope="module")
def examples():
    names: dict = {}
    for code in re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL):
        exec(compile(code, "docs/customize.md", "exec"), names)
    for name, value in names.items():
        register_function(f"docs.{name}", value)
    return names


def built(args, pool=None, source=None):
    source = source or RolloutDataSourceWithBuffer(args)
    return InferenceRolloutFn(RolloutFnConstructorInput(args, source, pool or FakePool()))


async def batch(args, **kwargs):
    return (await built(args, **kwargs)(RolloutFnTrainInput(0))).samples


def test_every_example_has_the_signature_that_startup_asks_for(examples):
    kinds = {
        "exact_match": "reward", "shortest_wins": "reward", "think_twice": "generate", "run_tool": "execute_tool",
        "ask_once": "agent",
        "some_but_not_all": "dynamic_filter", "drop_truncated": "sample_filter", "remember": "all_samples",
        "Curriculum": "data_source", "Sums": "data_source", "longest_first": "buffer_filter", "HotStart": "rollout",
        "replay_labels": "rollout", "constant_score": "rollout", "only_positive": "reward_post_process",
        "without_last_token": "convert_samples", "log_lengths": "rollout_log", "length_weighted": "loss",
    }  # fmt: skip
    for name, kind in kinds.items():
        HOOKS[kind](f"docs.{name}", examples[name])


async def test_rewards(run_args, examples):
    for group in await batch(run_args(custom_rm_path="docs.exact_match")):
        assert {s.reward for s in group} <= {0.0, 1.0}
    pool = FakePool(length=lambda payload: 2 + payload["sampling_params"]["sampling_seed"] % 5)
    for group in await batch(run_args(custom_rm_path="docs.shortest_wins", group_rm=True), pool=pool):
        shortest = min(s.response_length for s in group)
        assert [s.reward for s in group] == [float(s.response_length == shortest) for s in group]


async def test_generate_and_its_flag(run_args, examples):
    pool = FakePool()
    groups = await batch(
        run_args(custom_generate_function_path="docs.think_twice", rollout_max_response_len=100), pool=pool
    )
    assert len(pool.requests) == 16
    asked = len("\nAre you sure? ")
    for sample in (s for group in groups for s in group):
        sample.validate()
        assert sample.loss_mask == [1] * 5 + [0] * asked + [1] * 5
    import argparse

    parser = argparse.ArgumentParser()
    examples["think_twice"].add_arguments(parser)
    assert parser.parse_args([]).think_times == 2


async def test_tools(examples):
    assert await examples["run_tool"]("add", {"a": 2, "b": 3}) == "5"
    assert examples["TOOLS"][0]["function"]["name"] == "add"


async def test_filters_and_all_samples(run_args, examples):
    args = run_args(
        dynamic_sampling_filter_path="docs.some_but_not_all",
        rollout_all_samples_process_path="docs.remember",
        rollout_sample_filter_path="docs.drop_truncated",
        rollout_max_response_len=5,
    )
    for group in await batch(args, pool=FakePool(length=lambda p: 4 + p["sampling_params"]["sampling_seed"] % 4)):
        assert 0 < sum(s.reward > 0.5 for s in group) < len(group)
        assert all(s.remove_sample is (s.status is s.Status.TRUNCATED) for s in group)
    assert len(examples["SOLVED"]) > 4


async def test_data_sources(run_args, examples, tmp_path):
    curriculum = examples["Curriculum"](run_args(12))
    lengths = [len(group[0].prompt) for group in curriculum.get_samples(12)]
    assert lengths == sorted(lengths)
    args = run_args(save=str(tmp_path), load=str(tmp_path))
    sums = examples["Sums"](args)
    assert [group[0].prompt for group in await batch(args, source=sums)] == ["0+0=", "1+0=", "2+0=", "3+0="]
    sums.save(0)
    resumed = examples["Sums"](args)
    resumed.load(0)
    assert resumed.get_samples(1) == sums.get_samples(1)


def test_buffer_filter(run_args, examples):
    source = RolloutDataSourceWithBuffer(run_args(buffer_filter_path="docs.longest_first"))
    groups = source.get_samples(3)
    groups[1][0].response_length = 5
    source.add_samples(groups)
    assert [group[0].index for group in source.get_samples(2)] == [2, 0]


async def test_rollout_functions(run_args, examples):
    args = run_args()
    pool = FakePool()
    hot = examples["HotStart"](RolloutFnConstructorInput(args, RolloutDataSourceWithBuffer(args), pool))
    await hot(RolloutFnTrainInput(9))
    await hot(RolloutFnTrainInput(10))
    assert {r["sampling_params"]["temperature"] for r in pool.requests[:8]} == {1.3}
    assert {r["sampling_params"]["temperature"] for r in pool.requests[8:]} == {1.0}
    source = RolloutDataSourceWithBuffer(args)
    replay = load_rollout_function("docs.replay_labels", RolloutFnConstructorInput(args, source))
    samples, _ = postprocess_rollout(args, (await replay(RolloutFnTrainInput(0))).samples)
    convert_samples_to_train_data(args, samples)


async def test_evaluation(run_args, examples):
    text = re.search(r"```yaml\n(.*?)```", PAGE, re.DOTALL)[1]
    import base64

    config = "base64:" + base64.b64encode(text.encode()).decode()
    aime, tools = load_eval_configs(make_args("", eval_config=config))
    assert (aime.n_samples_per_eval_prompt, tools.n_samples_per_eval_prompt) == (4, 1)
    listed = set(re.findall(r"`(\w+)`", re.search(r"Keys of a data set: (.*?)\. Samples", PAGE, re.DOTALL)[1]))
    assert listed == set(vars(aime)), "the page lists every key"
    assert set(yaml.safe_load(text)["eval"]["datasets"][0]) <= listed
    function = load_rollout_function("docs.constant_score", RolloutFnConstructorInput(run_args(), None))
    assert (await function(RolloutFnEvalInput(0))).data["mine"]["rewards"] == [0.5]


async def test_train_data_hooks(run_args, examples):
    args = run_args()
    samples, _ = postprocess_rollout(args, await batch(args))
    args.custom_reward_post_process_path = "docs.only_positive"
    assert min(convert_samples_to_train_data(args, samples)["rewards"]) == 0.0
    args.custom_convert_samples_to_train_data_path = "docs.without_last_token"
    columns = convert_samples_to_train_data(args, samples)
    assert columns["rollout_mask_sums"] == [4] * 8
    assert examples["log_lengths"](0, args, samples, {}, 1.0) is False


def test_the_loss_of_ones_own_is_the_likelihood(examples):
    import torch

    from miles.backends.training_utils.loss_hub.reducers import RolloutMean

    torch.manual_seed(0)
    tokens = [torch.tensor([1, 2, 3, 0]), torch.tensor([3, 1, 2])]
    logits = torch.randn(1, 7, 4)
    batch = {"unconcat_tokens": tokens, "total_lengths": [4, 3], "response_lengths": [2, 1]}
    reducer = RolloutMean([torch.ones(2), torch.ones(1)], [2.0, 1.0], False)
    loss, metrics = examples["length_weighted"](None, batch, logits, reducer)
    log_probs = torch.log_softmax(logits[0], -1)
    expected = -(log_probs[1, 3] + log_probs[2, 0]) / 2 - log_probs[5, 2]
    assert torch.allclose(loss, expected)
    assert metrics["nll"] == loss
