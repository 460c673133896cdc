"""Prompt files: what a row means, and what is said about rows that mean nothing."""

from __future__ import annotations

import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from miles.rollout.data_source import RolloutDataSource
from miles.rollout.dataset import DatasetKeys, look_at_prompt_rows
from miles.rollout.prompt_files import DatasetError
from tests.fast.rollout.fakes import make_args, write_jsonl


def source(model_dir, data, **overrides):
    return RolloutDataSource(make_args(model_dir, prompt_data=data, **overrides))


def labels(model_dir, data, **overrides):
    return [row.label for row in source(model_dir, data, **overrides).rows]


def test_labels_stay_what_the_file_says_to_the_letter(model_dir, tmp_path):
    file = tmp_path / "a.jsonl"
    texts = [
        '"1.0"',
        '"007"',
        '"1e3"',
        "1.0",
        "1e3",
        "0.10",
        "true",
        "null",
        "[1, 2.50]",
        '{"a": 1E2}',
        "12345678901234567890123",
    ]
    file.write_text("".join('{"input": "q", "note": {"label": 5}, "label": %s}\n' % t for t in texts))  # noqa: UP031
    expected = [
        "1.0",
        "007",
        "1e3",
        "1.0",
        "1e3",
        "0.10",
        "true",
        None,
        "[1, 2.50]",
        '{"a": 1E2}',
        "12345678901234567890123",
    ]
    assert labels(model_dir, str(file)) == expected
    as_array = tmp_path / "a.json"
    as_array.write_text("[" + ",\n ".join(file.read_text().splitlines()) + "]")
    assert labels(model_dir, str(as_array)) == expected


def test_parquet_labels_of_every_type_become_strings(model_dir, tmp_path):
    for values, expected in ((["1.0", "007"], ["1.0", "007"]), ([1, 2], ["1", "2"]), ([1.0, 2.5], ["1.0", "2.5"])):
        file = tmp_path / "a.parquet"
        pq.write_table(pa.table({"input": ["a", "b"], "label": values}), file)
        assert labels(model_dir, str(file)) == expected


def test_parquet_messages_lose_the_nulls_that_the_table_added(model_dir, tmp_path):
    rows = [
        [{"role": "system", "content": "s"}, {"role": "user", "content": "q", "name": "ann"}],
        [{"role": "user", "content": "r"}],
    ]
    pq.write_table(pa.table({"input": rows, "label": ["1", "2"]}), tmp_path / "a.parquet")
    prompts = [row.prompt for row in source(model_dir, str(tmp_path / "a.parquet")).rows]
    assert prompts == rows


@pytest.mark.parametrize(
    ("part", "expected"), [("[1:3]", ["1", "2"]), ("[:2]", ["0", "1"]), ("[-1:]", ["4"]), ("[:]", list("01234"))]
)
def test_a_path_can_carry_a_slice(model_dir, tmp_path, part, expected):
    data = write_jsonl(tmp_path / "a.jsonl", [{"input": "q", "label": str(i)} for i in range(5)])
    assert labels(model_dir, f"{data}@{part}") == expected


def test_several_files_follow_each_other(model_dir, tmp_path):
    a = write_jsonl(tmp_path / "a.jsonl", [{"input": "q", "label": "a"}])
    b = write_jsonl(tmp_path / "b.jsonl", [{"input": "q", "label": str(i)} for i in range(3)])
    assert labels(model_dir, f"{a},{b}@[1:]") == ["a", "1", "2"]
    assert labels(model_dir, [b, a]) == ["0", "1", "2", "a"]


def test_metadata_may_be_json_text(model_dir, tmp_path):
    rows = [{"input": "q", "label": "", "metadata": m} for m in ('{"k": 1}', {"k": 1}, None, "")]
    data = write_jsonl(tmp_path / "a.jsonl", rows)
    assert [row.metadata for row in source(model_dir, data).rows] == [{"k": 1}, {"k": 1}, {}, {}]


def test_all_bad_rows_are_reported_together_with_file_and_row(model_dir, tmp_path):
    good = json.dumps({"input": "q", "label": "1"})
    lines = [good, "{broken", '"text"', "", '{"input": null, "label": "1"}', '{"label": "1"}', '{"input": "q"}']
    lines += ['{"input": "", "label": "1"}', '{"input": [{"content": "no role"}], "label": "1"}']
    lines += [
        '{"input": "q", "label": "1", "metadata": "{oops"}',
        '{"input": "q", "label": "1", "tools": {"a": 1}}',
        good,
    ]
    file = tmp_path / "bad.jsonl"
    file.write_text("\n".join(lines) + "\n")
    with pytest.raises(DatasetError) as error:
        source(model_dir, str(file))
    text = str(error.value)
    assert text.startswith("9 bad rows")
    for row, what in {
        2: "not JSON",
        3: "must be a JSON object",
        5: "'input' is null",
        6: "no field 'input' (it has label); set --input-key",
        7: "no field 'label' (it has input); set --label-key",
        8: "'input' is empty",
        9: "list of messages with roles",
        10: "'metadata' is a string that is not JSON",
        11: "'tools' must be a list",
    }.items():
        assert any(line.strip().startswith(f"{file} row {row}: ") and what in line for line in text.splitlines()), row


def test_one_bad_row_is_one_row_and_its_column_is_that_of_the_line(model_dir, tmp_path):
    file = tmp_path / "cut.jsonl"
    file.write_text('{"input": "q", "label": "1"}\n  {"input": "q"  \n')
    with pytest.raises(DatasetError) as error:
        source(model_dir, str(file))
    assert str(error.value) == (
        f"1 bad row in --prompt-data:\n  {file} row 2: not JSON: Expecting ',' delimiter at column 16"
    )


@pytest.mark.parametrize("part", ["@[a:b]", "@[1]", "@[0:4:2]", "@[0:4", "@0:4", "@[-:2]", "[0:4]"])
def test_a_slice_that_is_none_is_not_taken_for_a_missing_file(model_dir, tmp_path, part):
    data = write_jsonl(tmp_path / "a.jsonl", [{"input": "q", "label": "1"}])
    with pytest.raises(DatasetError) as error:
        source(model_dir, data + part)
    assert str(error.value).startswith(f"--prompt-data {data}{part}: {part} is no slice of rows.")
    assert f"{data}@[0:100]" in str(error.value)


def test_a_file_with_an_odd_name_is_a_file(model_dir, tmp_path):
    data = write_jsonl(tmp_path / "b.json@[a:b].jsonl", [{"input": "q", "label": "1"}])
    assert labels(model_dir, data) == ["1"]


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("missing.jsonl", None, "no such file"),
        ("a.csv", "x", "unknown format '.csv'"),
        ("a.json", '{"input": "q"}', "not a JSON array"),
        ("a.json", '[{"input": "q", "label": "1"}] []', "more text after the array"),
        ("a.parquet", "x", "not a readable parquet file"),
        ("empty.jsonl", "\n", "no rows"),
    ],
)
def test_unusable_files_are_named(model_dir, tmp_path, name, text, message):
    if text is not None:
        (tmp_path / name).write_text(text)
    with pytest.raises(DatasetError, match=message) as error:
        source(model_dir, str(tmp_path / name))
    assert name in str(error.value)


def test_a_file_that_is_no_text_is_named(model_dir, tmp_path):
    for name in ("a.jsonl", "a.json"):
        (tmp_path / name).write_bytes(b'{"input": "caf\xe9"}')
        with pytest.raises(DatasetError, match=rf"--prompt-data .*{name}: not UTF-8 text: .*0xe9"):
            source(model_dir, str(tmp_path / name))


# ---- a look at the data before the run -------------------------------------------------------------------------------


KEYS = DatasetKeys(label="label")


def test_a_look_finds_what_the_run_would(tmp_path):
    rows = [{"input": "q", "label": 1.50}, {"input": "q"}]
    data = write_jsonl(tmp_path / "a.jsonl", rows)
    assert [(r.prompt, r.label) for r in look_at_prompt_rows(f"{data}@[:1]", KEYS)[0]] == [("q", "1.5")]
    _, wrong = look_at_prompt_rows(f"{data},/nowhere.json", KEYS)
    assert wrong == [
        f"1 bad row in --prompt-data:\n  {data} row 2: no field 'label' (it has input); set --label-key",
        "--prompt-data /nowhere.json: no such file",
    ]
    assert "no rows" in look_at_prompt_rows(f"{data}@[5:]", KEYS)[1][0]


def large(directory, suffix):
    """100 rows, of which the last is bad."""
    rows = [{"input": "q" * 50, "label": str(i)} for i in range(99)] + [{"input": "", "label": "99"}]
    file = directory / f"large{suffix}"
    if suffix == ".parquet":
        pq.write_table(pa.Table.from_pylist(rows), file)
    else:
        between = "\n" if suffix == ".jsonl" else ","
        text = between.join(map(json.dumps, rows))
        file.write_text(text if suffix == ".jsonl" else f"[{text}]")
    return str(file)


@pytest.mark.parametrize("suffix", [".jsonl", ".json", ".parquet"])
def test_of_a_large_file_a_look_sees_the_head(tmp_path, monkeypatch, suffix):
    monkeypatch.setattr("miles.rollout.dataset._HEAD_BYTES", 1000)
    monkeypatch.setattr("miles.rollout.prompt_files._HEAD_ROWS", 10)
    file = large(tmp_path, suffix)
    rows, wrong = look_at_prompt_rows(file, KEYS)
    assert wrong == [] and 5 <= len(rows) <= 20
    assert [r.label for r in look_at_prompt_rows(f"{file}@[2:4]", KEYS)[0]] == ["2", "3"]
    for part in ("[-3:]", "[90:]", "[:-3]"):
        assert look_at_prompt_rows(f"{file}@{part}", KEYS) == ([], []), "where such a slice starts is not known yet"
    monkeypatch.setattr("miles.rollout.dataset._HEAD_BYTES", 1 << 20)
    assert "row 100: 'input' is empty" in look_at_prompt_rows(file, KEYS)[1][0]


def test_a_look_at_a_large_array_that_is_none(tmp_path, monkeypatch):
    monkeypatch.setattr("miles.rollout.dataset._HEAD_BYTES", 10)
    (tmp_path / "a.json").write_text(json.dumps({"rows": list(range(100))}))
    assert "not a JSON array of rows" in look_at_prompt_rows(str(tmp_path / "a.json"), KEYS)[1][0]


def test_a_chat_template_is_applied_to_strings_and_messages(model_dir, tmp_path):
    rows = [{"input": "hi", "label": ""}, {"input": [{"role": "system", "content": "be brief"}], "label": ""}]
    data = write_jsonl(tmp_path / "a.jsonl", rows)
    prompts = [row.prompt for row in source(model_dir, data, apply_chat_template=True).rows]
    assert prompts[0] == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    assert prompts[1] == "<|im_start|>system\nbe brief<|im_end|>\n<|im_start|>assistant\n"


def test_template_file_kwargs_and_tools_reach_the_template(model_dir, tmp_path):
    (tmp_path / "t.jinja").write_text(
        "{{ mode }}|{{ tools[0]['function']['name'] if tools else '-' }}|{{ messages[0]['content'] }}"
    )
    tools = [{"type": "function", "function": {"name": "add", "parameters": {}}}]
    rows = [
        {"input": "q", "label": "", "tools": tools},
        {"input": "q", "label": "", "tools": json.dumps(tools)},
        {"input": "q", "label": ""},
    ]
    loaded = source(
        model_dir,
        write_jsonl(tmp_path / "a.jsonl", rows),
        apply_chat_template=True,
        chat_template_path=str(tmp_path / "t.jinja"),
        apply_chat_template_kwargs={"mode": "fast"},
    ).rows
    assert [row.prompt for row in loaded] == ["fast|add|q", "fast|add|q", "fast|-|q"]
    assert loaded[0].metadata["tools"] == tools


def test_long_prompts_are_left_out_by_tokens_and_counted(model_dir, tmp_path):
    data = write_jsonl(tmp_path / "a.jsonl", [{"input": "x" * n, "label": str(n)} for n in (3, 10, 11)])
    loaded = source(model_dir, data, rollout_max_prompt_len=10)
    assert [row.label for row in loaded.rows] == ["3", "10"]
    assert loaded.num_overlong_prompts == 1
    chat = [{"input": [{"role": "user", "content": "x"}], "label": "chat"}, {"input": "x", "label": "text"}]
    loaded = source(model_dir, write_jsonl(tmp_path / "b.jsonl", chat), rollout_max_prompt_len=10)
    assert [row.label for row in loaded.rows] == ["text"], "messages are counted as the template renders them"


def test_nothing_left_after_the_length_filter_says_so(model_dir, tmp_path):
    data = write_jsonl(tmp_path / "a.jsonl", [{"input": "x" * 9, "label": ""}, {"input": "x" * 7, "label": ""}])
    with pytest.raises(
        DatasetError, match=r"all 2 prompts are longer than 5 tokens .*shortest has 7.*--rollout-max-prompt-len"
    ):
        source(model_dir, data, rollout_max_prompt_len=5)


def test_a_directory_without_a_tokenizer_is_named(tmp_path):
    data = write_jsonl(tmp_path / "a.jsonl", [{"input": "q", "label": ""}])
    (tmp_path / "model").mkdir()
    with pytest.raises(ValueError, match=r"--hf-checkpoint .*model: no tokenizer could be loaded"):
        source(tmp_path / "model", data)


def test_multimodal_keys_are_refused(model_dir, tmp_path):
    data = write_jsonl(tmp_path / "a.jsonl", [{"input": "q", "label": ""}])
    with pytest.raises(ValueError, match="--multimodal-keys"):
        source(model_dir, data, multimodal_keys={"image": "images"})
