"""Command lines: forms of flags, and everything that can be wrong with one, reported at once."""

from __future__ import annotations

import pickle
import subprocess
import sys

import pytest

from miles.arguments import ArgumentsError, make_args, parse_args
from miles.arguments.parse import read_command_line


def refused(argv: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    with pytest.raises(SystemExit) as exit_:
        parse_args(argv)
    assert exit_.value.code == 2
    return capsys.readouterr().err


def test_values_have_their_types(command):
    line = command("--lr", "1e-3", "--rollout-top-k", "-1", "--rollout-stop-token-ids", "1", "2", "--bf16")
    args = parse_args([*line, "--train-env-vars", '{"A": "1"}', "--rollout-stop", "###", "\n"])
    assert (args.lr, args.rollout_top_k, args.rollout_stop_token_ids, args.bf16) == (1e-3, -1, [1, 2], True)
    assert args.train_env_vars == {"A": "1"}
    assert args.rollout_stop == ["###", "\n"]


def test_negative_numbers_in_scientific_notation_are_values():
    assert read_command_line(["--opd-kl-coef", "-1e-3"]).opd_kl_coef == -1e-3


def test_public_spellings_of_switches():
    args = read_command_line(
        ["--disable-grpo-std-normalization", "--no-rope-fusion", "--disable-bias-linear", "--no-offload-train"]
    )
    assert args.grpo_std_normalization is False
    assert args.apply_rope_fusion is False
    assert args.add_bias_linear is False
    assert args.offload_train is False
    assert args.offload_rollout is None, "a tri-state switch that is not given stays undecided"


def test_the_last_of_repeated_flags_wins():
    assert read_command_line(["--lr", "1", "--lr", "2"]).lr == 2


def test_a_flag_that_may_be_repeated_keeps_every_occurrence():
    args = read_command_line(["--multi-lora-adapter", "a", "x", "--multi-lora-adapter", "b", "y"])
    assert args.multi_lora_adapter == [["a", "x"], ["b", "y"]]


def test_session_server_without_a_version_means_v1():
    assert read_command_line(["--use-session-server"]).use_session_server == "v1"
    assert read_command_line(["--use-session-server", "v2"]).use_session_server == "v2"


def test_everything_wrong_with_a_line_is_reported_together(command, capsys):
    wrong = [
        "--rolout-temperature",
        "1",
        "--lr",
        "fast",
        "--eps-clip",
        "-1",
        "--loss-type",
        "l2",
        "--use-wandb",
        "true",
    ]
    err = refused(command(*wrong), capsys)
    assert "unknown flag --rolout-temperature (did you mean --rollout-temperature" in err
    assert "--lr must be a number, not 'fast'" in err
    assert "--eps-clip must be at least 0, not -1" in err
    assert "--loss-type must be one of policy_loss, sft_loss, custom_loss, not 'l2'" in err
    assert "stray value 'true' after --use-wandb" in err
    assert err.startswith("miles: 5 problems")


def test_a_flag_is_not_completed_from_its_beginning(command, capsys):
    assert "unknown flag --rollout-batch (did you mean --rollout-batch-size" in refused(
        command("--rollout-batch", "4"), capsys
    )


@pytest.mark.parametrize(
    ("flag", "said"),
    [
        ("--learning-rate", "unknown flag --learning-rate (did you mean --lr?)"),
        ("--num-generations", "unknown flag --num-generations (did you mean --n-samples-per-prompt?)"),
        ("--banana-split", "unknown flag --banana-split\n"),
    ],
)
def test_names_of_other_trainers_are_known_and_nothing_far_off_is_offered(command, capsys, flag, said):
    assert said in refused(command(flag, "1"), capsys)


def test_a_missing_value_names_the_flag(capsys):
    assert "--lr: expected one argument" in refused(["--lr"], capsys)


def test_a_misspelt_engine_option_gets_near_names(command, capsys):
    err = refused(command("--sglang-mem-fraction-statc", "0.8"), capsys)
    assert "unknown flag --sglang-mem-fraction-statc (did you mean --sglang-mem-fraction-static" in err


def test_broken_rules_are_reported_together_with_exit_code_2(command, capsys):
    err = refused(command("--global-batch-size", "3", "--save-interval", "2"), capsys)
    assert "8 samples, but --global-batch-size 3" in err
    assert "--save-interval has no effect without --save" in err


def test_make_args_names_the_field_that_is_no_flag():
    with pytest.raises(ArgumentsError, match=r"no flag rolout_batch_size .did you mean rollout_batch_size"):
        make_args(rolout_batch_size=1)


def test_make_args_types_and_checks_fields():
    assert make_args(check=False, lr=1).lr == 1.0
    with pytest.raises(ArgumentsError, match="rollout_batch_size must be a whole number, not True"):
        make_args(check=False, rollout_batch_size=True)


def test_defaults_are_not_shared_between_runs():
    first = make_args(check=False)
    first.train_env_vars["A"] = "1"
    assert make_args(check=False).train_env_vars == {}


def test_args_survive_pickling_with_extras_and_bookkeeping(make):
    args = make()
    args.from_a_hook = 1
    copy = pickle.loads(pickle.dumps(args))
    assert copy.to_dict() == args.to_dict()
    assert copy.given == args.given and copy.derived == args.derived
    assert args.to_dict()["from_a_hook"] == 1


def test_secrets_are_neither_printed_nor_exported(make):
    args = make(use_wandb=True, wandb_key="s3cret")
    assert args.wandb_key == "s3cret"
    assert "s3cret" not in repr(args) and "wandb_key" not in args.to_dict()


def test_importing_arguments_imports_no_framework():
    code = (
        "import sys, miles.arguments, miles.arguments.plan, miles.arguments.reference\n"
        "heavy = {'torch', 'transformers', 'ray', 'numpy'} & set(sys.modules)\n"
        "sys.exit(f'imported {heavy}' if heavy else 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


def test_help_lists_the_projects_flags_by_group_and_not_the_engines(capsys):
    with pytest.raises(SystemExit) as exit_:
        parse_args(["--help"])
    assert exit_.value.code == 0
    text = capsys.readouterr().out
    assert "Weight update:" in text and "--update-weights-interval N" in text
    assert "at least 1; default 1" in text
    assert "--sglang-mem-fraction-static" not in text and "--sglang-NAME" in text
