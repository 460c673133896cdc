"""YAML over the command line, and FSDP YAML under it."""

from __future__ import annotations

import base64

import pytest

from miles.arguments import ArgumentsError, parse_args
from miles.arguments.plan import build_plan
from miles.utils.imports import register_function


@pytest.fixture
def yaml(tmp_path):
    def write(text: str) -> str:
        path = tmp_path / "config.yaml"
        path.write_text(text)
        return str(path)

    return write


def refused(argv, capsys) -> str:
    with pytest.raises(SystemExit):
        parse_args(argv)
    return capsys.readouterr().err


def test_yaml_overrides_the_command_line_and_is_typed(command, yaml):
    config = yaml("lr: 1e-5\nrollout-temperature: 1\nuse_dynamic_batch_size: true\nmax_tokens_per_gpu: 64\n")
    args = parse_args(command("--lr", "1e-3", "--custom-config-path", config))
    assert args.lr == 1e-5, "YAML reads 1e-5 as text; the flag makes it a number"
    assert args.rollout_temperature == 1.0
    assert args.use_dynamic_batch_size is True


def test_keys_that_are_no_flags_become_attributes_for_hooks_and_are_told_once(command, yaml, caplog):
    args = parse_args(command("--custom-config-path", yaml("rs_mode: truncate\nrs_veto_threshold: 0.1\n")))
    assert (args.rs_mode, args.rs_veto_threshold) == ("truncate", 0.1)
    told = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert told == build_plan(args)["warnings"]
    assert told == [
        "--custom-config-path: rs_mode, rs_veto_threshold are no flags and become attributes of args that only your own "
        "functions read"
    ]


def test_a_key_that_may_be_a_misspelt_flag_is_told_with_the_flag(command, yaml):
    (told,) = parse_args(command("--custom-config-path", yaml("batch-size: 4\n"))).warnings
    assert "batch_size (did you mean micro_batch_size or global_batch_size or rollout_batch_size?) is no flag" in told


def test_a_key_that_a_function_declared_is_no_surprise(command, yaml):
    def generate(args, sample, sampling_params):
        return sample

    generate.add_arguments = lambda parser: parser.add_argument("--think-times", type=int, default=2)
    register_function("yaml_test.generate", generate)
    line = command("--custom-generate-function-path", "yaml_test.generate")
    args = parse_args([*line, "--custom-config-path", yaml("think_times: 3\nlr: 0.5\n")])
    assert args.think_times == 3 and args.warnings == ()


def test_settings_of_a_correction_are_checked_and_are_no_surprise(command, yaml, capsys):
    path = "examples.infra_features.train_infer_mismatch_helper.mis.compute_mis_weights_with_cp"
    line = command("--use-tis", "--custom-tis-function-path", path)
    args = parse_args([*line, "--custom-config-path", yaml("tis_mode: mask\nrs_veto_threshold: 0.1\n")])
    assert args.tis_mode == "mask" and args.warnings == ()
    err = refused([*line, "--custom-config-path", yaml("tis_mode: drop\ntis_level: word\n")], capsys)
    assert "tis_mode 'drop' is not one of truncate, clip, mask" in err and "tis_level 'word'" in err


def test_a_misspelt_key_is_not_taken_for_an_attribute(command, yaml, capsys):
    err = refused(command("--custom-config-path", yaml("rollout_temprature: 0.5\n")), capsys)
    assert "rollout_temprature is no flag (did you mean rollout_temperature" in err


def test_a_key_may_not_replace_what_the_arguments_are_made_of(command, yaml, capsys):
    assert "to_dict is a name that the arguments use themselves" in refused(
        command("--custom-config-path", yaml("to_dict: 1\n")), capsys
    )


def test_yaml_values_are_checked_as_on_the_command_line(command, yaml, capsys):
    err = refused(command("--custom-config-path", yaml("lr: [1]\nloss_type: l2\nuse_tis: 3\n")), capsys)
    assert "--custom-config-path: lr must be a number" in err
    assert "--custom-config-path: loss_type must be one of" in err
    assert "--custom-config-path: use_tis must be true or false, not 3" in err


def test_rules_see_what_yaml_sets(command, yaml, capsys):
    err = refused(command("--custom-config-path", yaml("global_batch_size: 5\n")), capsys)
    assert "--global-batch-size 5" in err


def test_a_payload_in_base64(command):
    payload = "base64:" + base64.b64encode(b"lr: 0.5").decode()
    assert parse_args(command("--custom-config-path", payload)).lr == 0.5


@pytest.mark.parametrize(
    ("value", "said"),
    [
        ("base64:***", "not base64 of text"),
        ("/nowhere.yaml", "no such file"),
    ],
)
def test_unreadable_configuration(command, capsys, value, said):
    assert said in refused(command("--custom-config-path", value), capsys)


@pytest.mark.parametrize(("text", "said"), [("- a\n- b\n", "must hold a mapping"), ("a: [", "is not YAML")])
def test_a_file_that_is_no_mapping(command, yaml, capsys, text, said):
    assert said in refused(command("--custom-config-path", yaml(text)), capsys)


def test_the_command_line_wins_over_the_fsdp_file(command, yaml):
    args = parse_args(command("--config", yaml("lr: 0.5\nweight_decay: 0.25\n"), "--lr", "0.125"))
    assert (args.lr, args.weight_decay) == (0.125, 0.25)


def test_the_fsdp_file_takes_fsdp_flags_only(command, yaml, capsys):
    err = refused(command("--config", yaml("gradient_checkpoint: true\nrollout_batch_size: 3\n")), capsys)
    assert "gradient_checkpoint is no FSDP flag (did you mean gradient_checkpointing" in err
    assert "rollout_batch_size is no FSDP flag" in err


def test_make_args_reads_the_files_too(make, yaml):
    assert make(custom_config_path=yaml("lr: 0.5\n")).lr == 0.5
    with pytest.raises(ArgumentsError, match="no such file"):
        make(config="/nowhere.yaml")
