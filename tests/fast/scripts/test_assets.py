"""What the quick start trains on: the same for the same seed, loadable, and without the answers where none should be."""

import json
import sys
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).resolve().parents[3] / "scripts"
sys.path.insert(0, str(SCRIPTS))

import make_quickstart  # noqa: E402
import make_tasks  # noqa: E402

SMALL = ["--sft-rows", "300", "--train-rows", "40", "--eval-rows", "20"]


def rows(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.fixture(scope="module")
def assets(tmp_path_factory):
    folder = tmp_path_factory.mktemp("assets") / "quickstart"
    assert make_quickstart.main(["--out", str(folder), *SMALL]) == 0
    return folder


def test_the_same_seed_makes_the_same_bytes_and_another_seed_does_not(assets, tmp_path):
    for name, seed in (("same", "0"), ("other", "1")):
        make_quickstart.main(["--out", str(tmp_path / name), "--seed", seed, *SMALL])
    files = [path.relative_to(assets) for path in sorted(assets.rglob("*")) if path.is_file()]
    assert len(files) >= 6
    for file in files:
        assert (tmp_path / "same" / file).read_bytes() == (assets / file).read_bytes(), file
    for file in ("model/model.safetensors", "sft.jsonl", "train.jsonl"):
        assert (tmp_path / "other" / file).read_bytes() != (assets / file).read_bytes(), file


def test_held_out_words_are_in_no_other_file(assets):
    def words(name: str) -> set[str]:
        return {row["metadata"]["entry"]["metadata"]["word"].lower() for row in rows(assets / name)}

    shown = {row["messages"][0]["content"].rpartition(" ")[2].lower() for row in rows(assets / "sft.jsonl")}
    assert words("eval.jsonl")
    assert not words("eval.jsonl") & (words("train.jsonl") | shown)


def test_most_demonstrations_echo_the_word_and_the_rest_are_right(assets):
    echoes = right = 0
    for row in rows(assets / "sft.jsonl"):
        word, answer = row["messages"][0]["content"].rpartition(" ")[2], row["messages"][1]["content"]
        assert answer in (word, word[::-1])
        echoes, right = echoes + (answer == word), right + (answer == word[::-1])
    assert echoes > 0.6 * 300
    assert right > 0.2 * 300


def test_the_verifier_pays_for_the_label_and_not_for_the_echo(assets):
    from miles.rollout.rm_hub.reasoning_gym_reward import score

    for row in rows(assets / "train.jsonl"):
        word = row["metadata"]["entry"]["metadata"]["word"]
        assert score(row["label"], row["label"], row["metadata"]) == 1.0
        if word.lower() != word[::-1].lower():
            assert score(word, row["label"], row["metadata"]) < 1.0


def test_the_tokenizer_keeps_instructions_whole_and_words_in_letters(assets):
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(assets / "model")
    text = "Spell this word backward (example: sun -> nus): qzx"
    ids = tokenizer(text)["input_ids"]
    assert tokenizer.decode(ids) == text
    assert [tokenizer.decode([i]) for i in ids[-3:]] == ["q", "z", "x"]
    assert " backward" in [tokenizer.decode([i]) for i in ids]
    assert tokenizer.decode(tokenizer("naïve 火 🙂")["input_ids"]) == "naïve 火 🙂"  # bytes, so nothing is unknown
    assert tokenizer.eos_token == "<|im_end|>" and tokenizer.pad_token_id not in (None, tokenizer.eos_token_id)


def test_the_model_is_small_and_agrees_with_its_tokenizer(assets):
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    config, tokenizer = AutoConfig.from_pretrained(assets / "model"), AutoTokenizer.from_pretrained(assets / "model")
    model = AutoModelForCausalLM.from_pretrained(assets / "model")
    assert config.model_type == "qwen3"
    assert config.vocab_size >= len(tokenizer)
    assert config.eos_token_id == tokenizer.eos_token_id
    assert 0.8e6 < sum(p.numel() for p in model.parameters()) < 1.3e6


def test_existing_assets_are_left_alone(assets, capsys):
    before = (assets / "sft.jsonl").stat().st_mtime_ns
    assert make_quickstart.main(["--out", str(assets), "--seed", "9", *SMALL]) == 0
    assert "is there already" in capsys.readouterr().out
    assert (assets / "sft.jsonl").stat().st_mtime_ns == before


def test_a_failure_leaves_no_half_made_folder(tmp_path, monkeypatch):
    def full_disk(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(make_quickstart, "save_model", full_disk)
    with pytest.raises(OSError, match="No space left"):
        make_quickstart.main(["--out", str(tmp_path / "quickstart"), *SMALL])
    assert list(tmp_path.iterdir()) == []


def test_tasks_are_written_with_their_entry(tmp_path):
    out = tmp_path / "deeper" / "sums.jsonl"
    config = '{"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}'
    make_tasks.main(["--task", "chain_sum", "--config", config, "--rows", "5", "--out", str(out)])
    written = rows(out)
    assert len(written) == 5
    assert all(row["metadata"]["task"] == "chain_sum" and row["label"] for row in written)


@pytest.mark.parametrize(
    ("task", "config", "why"),
    [("no_such_task", "{}", "no_such_task"), ("chain_sum", '{"min_terms": 9, "max_terms": 2}', "max_terms")],
)
def test_a_task_that_cannot_be_made_is_refused_with_the_reason(task, config, why, tmp_path, capsys):
    with pytest.raises(SystemExit):
        make_tasks.main(["--task", task, "--config", config, "--out", str(tmp_path / "x.jsonl")])
    assert why in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []
