"""Import paths are resolved, and their signatures checked, before anything starts."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from miles.arguments.args import FLAGS
from miles.arguments.rules.hooks import HOOKS, Call
from miles.arguments.systems import works
from miles.utils.imports import register_function


class TypedRollout:
    def __init__(self, input):
        self.input = input

    async def __call__(self, input):
        return input


class RolloutWithoutCall:
    def __init__(self, input):
        self.input = input


class Source:
    def __init__(self, args):
        self.args = args

    def get_samples(self, n): ...
    def add_samples(self, samples): ...
    def save(self, rollout_id): ...
    def load(self, rollout_id): ...


def legacy_rollout(args, rollout_id, data_source, evaluation=False): ...
def rollout_without_evaluation(args, rollout_id, data_source): ...
async def typed_generate(input): ...
async def legacy_generate(args, sample, sampling_params): ...
async def legacy_generate_with_evaluation(args, sample, sampling_params, evaluation=False): ...
async def two_arguments(a, b): ...
async def reward(args, sample, **kwargs): ...
def any_keywords(**kwargs): ...
def icepop(*, args, pg_loss, train_log_probs, rollout_log_probs, loss_masks, **kwargs): ...
def one(a): ...
def four(a, b, c, d): ...
def five(a, b, c, d, e): ...


class Generator:
    async def __call__(self, input):
        return input


@pytest.fixture(autouse=True)
def _paths():
    for name, value in list(globals().items()):
        if callable(value) and getattr(value, "__module__", None) == __name__:
            register_function(f"mine.{name}", value)


@pytest.mark.parametrize(
    ("field", "path"),
    [
        ("rollout_function_path", "mine.TypedRollout"),
        ("rollout_function_path", "mine.legacy_rollout"),
        ("custom_generate_function_path", "mine.typed_generate"),
        ("custom_generate_function_path", "mine.legacy_generate"),
        ("custom_generate_function_path", "mine.legacy_generate_with_evaluation"),
        ("custom_generate_function_path", "mine.Generator"),
        ("data_source_path", "mine.Source"),
        ("custom_rm_path", "mine.reward"),
        ("dynamic_sampling_filter_path", "mine.reward"),
        ("buffer_filter_path", "mine.four"),
        ("custom_rollout_log_function_path", "mine.five"),
        ("custom_eval_rollout_log_function_path", "mine.four"),
        ("custom_pg_loss_reducer_function_path", "mine.four"),
    ],
)
def test_accepted_forms(field, path, problems):
    assert problems(**{field: path}) == []


@pytest.mark.parametrize(
    ("field", "path", "said"),
    [
        ("rollout_function_path", "mine.RolloutWithoutCall", "class RolloutWithoutCall has no __call__"),
        (
            "rollout_function_path",
            "mine.rollout_without_evaluation",
            "cannot be called as (arg1, arg2, arg3, evaluation=...)",
        ),
        ("custom_generate_function_path", "mine.two_arguments", "cannot be called as (arg1)"),
        ("data_source_path", "mine.one", "must be a class with get_samples"),
        ("data_source_path", "mine.Generator", "cannot be called as (arg1)"),
        ("custom_rm_path", "mine.one", "--custom-rm-path: mine.one(a) cannot be called as (arg1, arg2)"),
        ("custom_rm_path", "no_such_package.reward", "--custom-rm-path: no_such_package.reward: no module named"),
        ("custom_rm_path", "os.path.nothing", "posixpath has no attribute 'nothing'"),
        ("custom_rm_path", "reward.py:fn", "is not an import path"),
        ("rollout_engine", "fast", "--rollout-engine must be one of sglang, embedded, or an import path, not 'fast'"),
        ("rollout_engine", "no_such_package.launch", "--rollout-engine: no_such_package.launch: no module named"),
        ("update_weight_transfer_mode", "tcp", "must be one of broadcast, ipc, p2p, disk-delta, or an import path"),
    ],
)
def test_refused_paths(field, path, said, problems):
    found = problems(**{field: path})
    assert any(said.replace("posixpath", "os.path") in p or said in p for p in found), found


def test_a_correction_is_called_with_the_documented_keywords(problems):
    assert problems(use_tis=True, custom_tis_function_path="mine.any_keywords") == []
    assert problems(use_tis=True, custom_tis_function_path="mine.icepop") == []
    (problem,) = problems(use_tis=True, custom_tis_function_path="mine.four")
    assert "--custom-tis-function-path" in problem


def test_a_custom_loss_with_its_function(problems):
    assert problems(loss_type="custom_loss", custom_loss_function_path="mine.four") == []
    assert problems(loss_type="custom_loss", custom_loss_function_path="mine.one") != []


def test_all_wrong_hooks_are_reported_together(problems):
    assert len(problems(custom_rm_path="mine.one", buffer_filter_path="mine.one", data_source_path="mine.one")) == 3


def test_the_functions_that_the_product_ships_pass_their_own_check(problems):
    sft = {
        "rollout_function_path": "miles.rollout.sft_rollout.generate_rollout",
        "loss_type": "sft_loss",
        "compute_advantages_and_returns": False,
        "debug_train_only": True,
        "rollout_num_gpus": None,
    }
    assert problems(**sft) == []


def test_defaults_are_importable_and_have_the_right_signature():
    from miles.arguments.resolve import DATA_SOURCE, ROLLOUT_FUNCTION
    from miles.arguments.rules.hooks import problems_of

    assert list(problems_of("--data-source-path", "data_source", DATA_SOURCE)) == []
    assert list(problems_of("--rollout-function-path", "rollout", ROLLOUT_FUNCTION)) == []


def test_the_help_of_every_hook_shows_the_signature_that_the_guide_explains():
    guide = (Path(__file__).parents[3] / "docs" / "customize.md").read_text()
    for flag in FLAGS.values():
        call = getattr(HOOKS.get(flag.hook), "__self__", None)
        if not isinstance(call, Call) or call.keywords or not works(flag.system):
            continue
        (shown, *_) = re.findall(r"\([a-z_]+(?:, \w+)*\)", flag.help)
        assert call.positional == shown.count(",") + 1, flag.option
        assert shown.rstrip(")") in guide, f"{flag.option} {shown}"


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"rm_type": "mathh"}, "unknown reward type 'mathh' (did you mean"),
        ({"rm_type": "remote_rm"}, "needs --rm-url"),
        ({"rm_type": "dapo"}, "set --reward-key score"),
    ],
)
def test_built_in_rewards_are_checked(changes, said, problems):
    (problem,) = problems(label_key="label", **changes)
    assert said in problem


def test_a_generate_function_of_one_evaluation_dataset(problems, fields, tmp_path):
    config = tmp_path / "eval.json"
    dataset = {"name": "m", "path": fields["prompt_data"], "custom_generate_function_path": "mine.two_arguments"}
    config.write_text(json.dumps({"eval": {"datasets": [dataset]}}))
    (problem,) = problems(eval_interval=1, eval_config=str(config))
    assert problem.startswith("--eval-config m: custom_generate_function_path: mine.two_arguments")
