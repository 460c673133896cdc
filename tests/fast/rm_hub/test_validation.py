"""Rewards that cannot work are refused before anything starts, all at once."""

import pytest

from miles.rollout.rm_hub import RewardConfigError, registry, reward_problems, row_problems, validate_reward_config


@pytest.mark.parametrize("rm_type", ["math", "boxed_math", "f1", "gpqa", "deterministic_random", "reasoning_gym", None])
def test_what_works_passes(args, rm_type):
    args.rm_type = rm_type
    validate_reward_config(args)


@pytest.mark.parametrize(
    "flags, message",
    [
        ({"rm_type": "deepscalr"}, "did you mean deepscaler"),
        ({"rm_type": "boxed_nothing"}, "unknown reward type 'boxed_nothing'"),
        ({"rm_type": "remote_rm"}, "needs --rm-url"),
        ({"rm_type": "dapo"}, "set --reward-key score"),
        ({"custom_rm_path": "miles.rollout.rm_hub.nothing"}, "no attribute 'nothing'"),
        ({"custom_rm_path": "os.getcwd"}, "cannot be called as"),
        ({"custom_rm_path": "os.sep"}, "not a function"),
    ],
)
def test_what_cannot_work_is_refused(args, flags, message):
    vars(args).update(flags)
    with pytest.raises(RewardConfigError, match=message):
        validate_reward_config(args)


def test_a_missing_package_is_named_with_the_way_to_get_it(args, monkeypatch):
    monkeypatch.setattr(registry.importlib.util, "find_spec", lambda name: None)
    for name in ("math", "deepscaler", "gemma_math", "ifbench", "reasoning_gym"):
        args.rm_type = name
        (problem,) = reward_problems(args)
        assert f"--rm-type {name} needs the package" in problem and "pip install" in problem


def test_rows_are_checked_when_they_are_read_and_named(args):
    rows = [(f"train.jsonl row {i}", {"rm_type": name}) for i, name in enumerate(["math", "", "mth", "mth", "f1"])]
    problems = row_problems(args, rows)
    assert len(problems) == 2
    assert problems[0].startswith("train.jsonl row 1: no reward")
    assert problems[1].startswith("train.jsonl row 2, train.jsonl row 3") and "did you mean math" in problems[1]
    args.rm_type = "f1"
    assert len(row_problems(args, rows)) == 1
    args.custom_rm_path = "user.reward"
    assert row_problems(args, rows) == []
