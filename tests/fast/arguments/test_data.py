"""Prompt data is looked at before anything starts: files, rows, and the labels that rewards compare with."""

from __future__ import annotations

import json

import pytest


@pytest.fixture
def data(tmp_path):
    """`data(rows)` -> a prompt file; a row is a dict, or the text of a line."""

    def write(*rows, name="data.jsonl"):
        path = tmp_path / name
        path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
        return str(path)

    return write


def test_prompt_data(problems, fields):
    assert "--prompt-data is required" in problems(prompt_data=None)[0]
    assert problems(prompt_data=fields["prompt_data"] + "@[0:1]") == []
    two = fields["prompt_data"] + ",/nowhere.jsonl"
    assert problems(prompt_data=two) == ["--prompt-data /nowhere.jsonl: no such file"]
    assert problems(prompt_data=None, rollout_global_dataset=False) == []


def test_eval_data(problems, fields):
    good = ["math", fields["prompt_data"]]
    assert problems(eval_interval=1, eval_prompt_data=good) == []
    assert problems(eval_interval=1, eval_prompt_data=[fields["prompt_data"]]) == []
    assert problems(eval_interval=1, eval_prompt_data=["m", "/nowhere.jsonl"]) == [
        "--eval-prompt-data m /nowhere.jsonl: no such file"
    ]
    assert "given twice: math" in problems(eval_interval=1, eval_prompt_data=good + good)[0]
    assert problems(eval_interval=1, eval_prompt_data=[*good, "odd"]) != []


def test_eval_config(problems, tmp_path, fields):
    config = tmp_path / "eval.yaml"
    config.write_text(
        json.dumps({"eval": {"datasets": [{"name": "m", "path": fields["prompt_data"], "tempreture": 1}]}})
    )
    (problem,) = problems(eval_interval=1, eval_config=str(config))
    assert "--eval-config" in problem and "tempreture" in problem


def test_bad_rows_are_told_at_startup_in_the_words_of_the_run(problems, data):
    file = data({"input": "q"}, {"question": "q", "answer": "a"}, '{"input": "q"')
    (problem,) = problems(prompt_data=file)
    assert problem.splitlines() == [
        "2 bad rows in --prompt-data:",
        f"  {file} row 3: not JSON: Expecting ',' delimiter at column 14",
        f"  {file} row 2: no field 'input' (it has answer, question); set --input-key",
    ]
    assert problems(prompt_data=file + "@[0:1]") == [], "rows outside the slice are not read"


def test_every_unusable_file_is_told(problems, data, tmp_path):
    good, odd = data({"input": "q"}), data("x", name="data.csv")
    found = problems(prompt_data=f"{good}@[a:b],{odd},/nowhere.jsonl,{tmp_path}")
    assert len(found) == 4
    assert found[0].startswith(f"--prompt-data {good}@[a:b]: @[a:b] is no slice of rows.") and "@[0:100]" in found[0]
    assert found[1] == f"--prompt-data {odd}: unknown format '.csv'; use .jsonl, .json or .parquet"
    assert found[2:] == [
        "--prompt-data /nowhere.jsonl: no such file",
        f"--prompt-data {tmp_path}: a folder; name the files in it",
    ]


def test_a_data_set_of_evaluation_is_looked_at_with_its_own_columns(problems, data, tmp_path):
    file = data({"question": "q", "answer": "a"})
    flags = {"eval_interval": 1, "eval_prompt_data": ["m", file]}
    assert problems(**flags, eval_input_key="question") == []
    (problem,) = problems(**flags)
    assert problem.startswith("1 bad row in --eval-prompt-data m:") and "set --eval-input-key" in problem
    config = tmp_path / "eval.yaml"
    config.write_text(json.dumps({"eval": {"datasets": [{"name": "m", "path": file}]}}))
    (problem,) = problems(eval_interval=1, eval_config=str(config))
    assert problem.startswith("1 bad row in --eval-config m:") and "set its input_key" in problem


def test_rows_of_a_data_source_of_the_users_own_are_its_own_matter(problems, data):
    file = data("no JSON")
    assert problems(prompt_data=file) != []
    assert problems(prompt_data=file, data_source_path="tests.fast.arguments.test_data.Source") == []


class Source:
    def __init__(self, args):
        pass

    def get_samples(self, n): ...
    def add_samples(self, groups): ...
    def save(self, rollout_id): ...
    def load(self, rollout_id): ...


# ---- rewards ---------------------------------------------------------------------------------------------------------


def test_rewards_that_rows_name_are_checked(problems, data):
    rows = [{"input": "q", "metadata": {"rm_type": name}} for name in ("deterministic_random", "mth", "mth")]
    file = data(*rows)
    (problem,) = problems(prompt_data=file)
    assert problem.startswith(f"{file} row 2, {file} row 3: metadata['rm_type']: unknown reward type 'mth'")
    (problem,) = problems(prompt_data=data({"input": "q"}), rm_type=None)
    assert "no reward; set --rm-type, --custom-rm-path" in problem


@pytest.mark.parametrize("rm_type", ["math", "boxed_math", "f1", "deepscaler"])
def test_a_reward_that_needs_a_label_needs_a_label_key(problems, fields, rm_type):
    (problem,) = problems(rm_type=rm_type)
    assert problem == (
        f"reward {rm_type} compares responses with a label, and none is read from --prompt-data: set --label-key to the "
        "column that has it"
    )
    assert problems(rm_type=rm_type, label_key="label") == []
    assert "set --label-key" in problems(rm_type=rm_type, prompt_data="/nowhere.jsonl")[1], (
        "told with what else is wrong"
    )
    sft = {"loss_type": "sft_loss", "compute_advantages_and_returns": False, "debug_train_only": True}
    sft |= {"rollout_function_path": "miles.rollout.sft_rollout.generate_rollout", "rollout_num_gpus": None}
    assert problems(rm_type=rm_type, **sft) == [], "nothing is scored"


def test_labels_of_evaluation_and_of_rows_with_their_own_reward(problems, data, tmp_path):
    named = data({"input": "q", "metadata": {"rm_type": "f1"}}, {"input": "q"})
    (problem,) = problems(prompt_data=named)
    assert problem.startswith("reward f1 compares responses with a label, and none is read from --prompt-data")
    config = tmp_path / "eval.yaml"
    config.write_text(json.dumps({"eval": {"datasets": [{"name": "m", "path": named, "rm_type": "math"}]}}))
    (problem,) = problems(eval_interval=1, eval_config=str(config))
    assert problem.startswith(
        "reward math compares responses with a label, and none is read from --eval-config m: set its label_key"
    )


def test_rows_without_the_label_that_their_reward_compares_with(problems, data):
    file = data(*({"input": "q", "label": label} for label in ("1", None, " ", "2")))
    (problem,) = problems(prompt_data=file, rm_type="math", label_key="label")
    assert problem == f"{file} row 2, {file} row 3: 'label' is empty, and the reward compares with it"
    assert problems(prompt_data=file, label_key="label") == [], "a random reward compares with nothing"


@pytest.mark.parametrize(
    ("changes", "warned"),
    [
        ({"custom_rm_path": "tests.helpers.rewards.even_token_share", "rm_type": None}, True),
        ({"rm_type": "gpqa"}, True),
        ({"rm_type": "gpqa", "label_key": "label"}, False),
        ({"rm_type": "deterministic_random"}, False),
    ],
)
def test_a_label_that_no_flag_names_is_worth_a_warning(make, changes, warned):
    told = [w for w in make(**changes).warnings if "set --label-key label if" in w]
    assert len(told) == warned


# ---- the drivers -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("more", [[], ["--dry-run"]])
def test_a_driver_tells_bad_data_before_it_starts_anything(command, data, capsys, monkeypatch, more):
    from miles.ray import driver_main

    async def train(args):
        raise AssertionError("started")

    monkeypatch.setattr("sys.argv", ["train.py"])
    with pytest.raises(SystemExit) as ended:
        driver_main.main(train, "train.py", command("--prompt-data", data("[1]"), *more))
    assert ended.value.code == 2
    assert "row 1: a row must be a JSON object, not a list" in capsys.readouterr().err
