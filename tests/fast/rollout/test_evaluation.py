"""Evaluation: data sets with their own settings, scores only from samples that have one."""

from __future__ import annotations

import base64
import json

import pytest

from miles.rollout.base_types import RolloutFnConstructorInput, RolloutFnEvalInput
from miles.rollout.data_source import RolloutDataSourceWithBuffer
from miles.rollout.eval_config import load_eval_configs
from miles.rollout.inference_rollout import InferenceRolloutFn
from miles.rollout.prompt_files import DatasetError
from miles.rollout.rm_hub import RewardConfigError
from miles.tracking.rollout_metrics import compute_eval_metrics
from miles.utils.imports import ImportPathError, register_function
from miles.utils.types import Sample, SampleStatus
from tests.fast.rollout.fakes import FakePool, make_args, prompt_rows, write_jsonl


@pytest.fixture
def sets(tmp_path):
    return write_jsonl(tmp_path / "a.jsonl", prompt_rows(3)), write_jsonl(tmp_path / "b.jsonl", prompt_rows(2))


async def evaluate(args, pool):
    function = InferenceRolloutFn(RolloutFnConstructorInput(args, RolloutDataSourceWithBuffer(args), pool))
    return await function(RolloutFnEvalInput(0))


def config_file(tmp_path, config):
    path = tmp_path / "eval.yaml"
    path.write_text(json.dumps(config))
    return str(path)


async def test_every_data_set_has_its_own_settings(run_args, sets, tmp_path):
    async def shout(args, sample, sampling_params):
        sample.tokens, sample.response_length, sample.status = [1, 2], 1, SampleStatus.TRUNCATED
        sample.response = sample.metadata["split"]
        return sample

    async def reward(args, sample, **kwargs):
        return 1.0 if sample.reward_spec else 0.0

    register_function("test.shout", shout)
    register_function("test.reward", reward)
    config = {
        "eval": {
            "defaults": {"temperature": 0.5, "n_samples_per_eval_prompt": 2},
            "datasets": [
                {"name": "a", "path": sets[0], "stop": ["x"], "stop_token_ids": [3], "min_new_tokens": 2, "max_response_len": 4},
                {
                    "name": "b", "path": sets[1], "n_samples_per_eval_prompt": 1, "rm_type": "math",
                    "custom_generate_function_path": "test.shout", "metadata_overrides": {"split": "diamond"},
                },
            ],
        }
    }  # fmt: skip
    pool = FakePool()
    output = await evaluate(run_args(eval_config=config_file(tmp_path, config), custom_rm_path="test.reward"), pool)
    assert len(pool.requests) == 6
    params = pool.requests[0]["sampling_params"]
    assert (params["temperature"], params["max_new_tokens"], params["min_new_tokens"]) == (0.5, 4, 2)
    assert (params["stop"], params["stop_token_ids"]) == (["x"], [3])
    assert output.data["a"]["rewards"] == [0.0] * 6
    assert output.data["b"]["rewards"] == [1.0] * 2
    assert output.data["b"]["truncated"] == [True, True]
    assert [s.response for s in output.data["b"]["samples"]] == ["diamond"] * 2
    assert [s.group_index for s in output.data["a"]["samples"]] == [0, 0, 1, 1, 2, 2]


async def test_failed_samples_have_no_reward_and_are_counted_and_told(run_args, sets, caplog):
    async def reward(args, sample, **kwargs):
        return None if sample.group_index == 1 else 1.0

    register_function("test.reward", reward)
    args = run_args(
        eval_prompt_data=["a", sets[0]], n_samples_per_eval_prompt=2, custom_rm_path="test.reward", max_sample_retries=0
    )
    output = await evaluate(args, FakePool())
    assert output.data["a"]["rewards"] == [1.0, 1.0, None, None, 1.0, 1.0]
    assert "evaluation a: 2 of 6 samples failed and have no score (reward_none 2)" in caplog.text
    metrics = compute_eval_metrics(args, output.data)
    assert metrics["eval/a"] == 1.0
    assert metrics["eval/a-none_reward_ratio"] == pytest.approx(1 / 3)
    assert metrics["eval/a-pass@2"] == 1.0


async def test_evaluation_is_the_same_every_time_and_draws_no_training_prompt(run_args, sets):
    args = run_args(eval_prompt_data=["a", sets[0]], n_samples_per_eval_prompt=2)
    source = RolloutDataSourceWithBuffer(args)
    pool = FakePool()
    function = InferenceRolloutFn(RolloutFnConstructorInput(args, source, pool))
    outputs = [await function(RolloutFnEvalInput(r)) for r in range(2)]
    tokens = [[s.tokens for s in output.data["a"]["samples"]] for output in outputs]
    assert tokens[0] == tokens[1]
    assert source.sample_index == 0
    assert len({r["sampling_params"]["sampling_seed"] for r in pool.requests}) == 6


async def test_eval_reward_key(run_args, sets):
    async def reward(args, sample, **kwargs):
        return {"acc": 0.25, "len": 3}

    register_function("test.reward", reward)
    args = run_args(
        eval_prompt_data=["a", sets[0]], custom_rm_path="test.reward", eval_reward_key="acc", reward_key="len"
    )
    assert (await evaluate(args, FakePool())).data["a"]["rewards"] == [0.25] * 3


async def test_group_rewards_see_all_samples_of_a_prompt(run_args, sets):
    async def reward(args, samples, **kwargs):
        return [float(len(samples))] * len(samples)

    register_function("test.reward", reward)
    args = run_args(
        eval_prompt_data=["a", sets[0]], n_samples_per_eval_prompt=2, custom_rm_path="test.reward", group_rm=True
    )
    assert (await evaluate(args, FakePool())).data["a"]["rewards"] == [2.0] * 6


async def test_evaluation_has_its_own_context_length(run_args, sets):
    pool = FakePool(length=lambda payload: 100)
    args = run_args(eval_prompt_data=["a", sets[0]], rollout_max_response_len=90, eval_max_context_len=20)
    output = await evaluate(args, pool)
    assert [len(s.tokens) for s in output.data["a"]["samples"]] == [20] * 3
    assert output.data["a"]["truncated"] == [True] * 3


def test_bad_evaluation_data_is_told_at_startup(run_args, sets, tmp_path):
    def build(**overrides):
        args = run_args(**overrides)
        return InferenceRolloutFn(RolloutFnConstructorInput(args, RolloutDataSourceWithBuffer(args), FakePool()))

    with pytest.raises(DatasetError, match="no such file"):
        build(eval_prompt_data=["a", str(tmp_path / "nowhere.jsonl")])
    config = {"eval": {"datasets": [{"name": "a", "path": sets[0], "custom_generate_function_path": "nope.fn"}]}}
    with pytest.raises(ImportPathError, match="nope"):
        build(eval_config=config_file(tmp_path, config))


def test_a_reward_that_does_not_exist_is_told_at_startup_with_its_row(run_args, sets, tmp_path):
    rows = [{"input": "q", "label": "1", "metadata": {"rm_type": t}} for t in ("math", "maths")]
    data = write_jsonl(tmp_path / "rm.jsonl", rows)
    for overrides in ({"prompt_data": data}, {"eval_prompt_data": ["a", data], "rm_type": "math"}):
        args = run_args(custom_rm_path=None, **overrides)
        with pytest.raises(RewardConfigError, match=r"rm.jsonl row 2.*maths"):
            InferenceRolloutFn(RolloutFnConstructorInput(args, RolloutDataSourceWithBuffer(args), FakePool()))
    args = run_args(custom_rm_path=None)
    with pytest.raises(RewardConfigError, match="no reward; set --rm-type"):
        InferenceRolloutFn(RolloutFnConstructorInput(args, RolloutDataSourceWithBuffer(args), FakePool()))


def test_pass_at_k_uses_the_data_sets_own_n_and_complete_prompts():
    rewards = [1.0, 0.0, 0.0, 0.0, 1.0, 1.0, 0.0, 0.0, None, 1.0, 1.0, 1.0]
    samples = [Sample(group_index=i // 4, index=i, reward=r) for i, r in enumerate(rewards)]
    data = {"d": {"rewards": rewards, "truncated": [], "samples": samples}}
    metrics = compute_eval_metrics(make_args("", n_samples_per_prompt=8), data)
    assert metrics["eval/d-pass@1"] == pytest.approx((1 / 4 + 2 / 4) / 2)
    assert metrics["eval/d-pass@2"] == pytest.approx(((1 - 3 / 6) + (1 - 1 / 6)) / 2)
    assert metrics["eval/d-pass@4"] == 1.0
    assert "eval/d-pass@8" not in metrics
    single = {"d": {"rewards": [1.0], "truncated": [], "samples": samples[:1]}}
    assert "eval/d-pass@1" not in compute_eval_metrics(make_args(""), single)


def test_pairs_and_the_forms_of_a_config(sets, tmp_path):
    a, b = sets
    assert [(c.name, c.path) for c in load_eval_configs(make_args("", eval_prompt_data=["x", a, "y", b]))] == [
        ("x", a),
        ("y", b),
    ]
    assert load_eval_configs(make_args("", eval_prompt_data=[a]))[0].name == "aime"
    assert load_eval_configs(make_args("")) == []
    text = json.dumps({"eval": {"datasets": [{"name": "x", "path": a}]}})
    encoded = "base64:" + base64.b64encode(text.encode()).decode()
    (config,) = load_eval_configs(make_args("", eval_config=encoded, eval_prompt_data=["y", b], eval_temperature=0.1))
    assert (config.name, config.temperature, config.max_response_len) == ("x", 0.1, 8)


def test_config_mistakes_are_listed_together(sets, tmp_path):
    config = {"eval": {"datasets": [{"path": "p"}, {"name": "x", "path": "p", "temprature": 1}], "default": {}}}
    with pytest.raises(ValueError) as error:
        load_eval_configs(make_args("", eval_config=config_file(tmp_path, config)))
    for part in ("'name' is missing", "datasets[1]: unknown key 'temprature'", "unknown section 'default'"):
        assert part in str(error.value)
    twice = {"eval": {"datasets": [{"name": "x", "path": "p"}, {"name": "x", "path": "q"}]}}
    with pytest.raises(ValueError, match="given twice: x"):
        load_eval_configs(make_args("", eval_config=config_file(tmp_path, twice)))
    with pytest.raises(ValueError, match="takes pairs NAME PATH, got 3"):
        load_eval_configs(make_args("", eval_prompt_data=["a", "b", "c"]))
    with pytest.raises(ValueError, match=r"--eval-config .*nowhere.yaml: no such file"):
        load_eval_configs(make_args("", eval_config=str(tmp_path / "nowhere.yaml")))
    with pytest.raises(ValueError, match="base64"):
        load_eval_configs(make_args("", eval_config="base64:!!!"))
