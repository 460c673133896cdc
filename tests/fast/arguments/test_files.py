"""What must be on disk before a run starts."""

from __future__ import annotations

import json
import struct

import pytest

from .conftest import CONFIG, write_checkpoint, write_model


def test_an_absent_model_directory(problems):
    (problem,) = problems(hf_checkpoint="/nowhere")
    assert problem.startswith("--hf-checkpoint /nowhere: no such directory")


def test_no_model_at_all(problems):
    assert "--hf-checkpoint is required: a Hugging Face model directory" in problems(hf_checkpoint=None)


def test_everything_that_a_model_directory_lacks_is_listed(problems, tmp_path):
    empty = tmp_path / "empty"
    empty.mkdir()
    (problem,) = problems(hf_checkpoint=str(empty))
    for part in ("config.json", "weights (*.safetensors", "a tokenizer (tokenizer.json"):
        assert part in problem


def test_a_shard_that_the_index_lists(problems, model):
    index = {"weight_map": {"a": "model.safetensors", "b": "model-2.safetensors"}}
    (model / "model.safetensors.index.json").write_text(json.dumps(index))
    (problem,) = problems()
    assert "weight file model-2.safetensors" in problem


def test_the_reference_model_is_checked_when_it_is_used(problems, tmp_path):
    other = write_model(tmp_path / "ref")
    assert problems(use_kl_loss=True, ref_load=str(other)) == []
    (other / "model.safetensors").unlink()
    (problem,) = problems(use_kl_loss=True, ref_load=str(other))
    assert problem.startswith(f"--ref-load {other}: missing weights")


def test_a_chat_template_must_exist_somewhere(problems, model, tmp_path):
    assert problems(apply_chat_template=True) == []
    (model / "tokenizer_config.json").write_text("{}")
    (problem,) = problems(apply_chat_template=True)
    assert "has no chat template: set --chat-template-path" in problem
    template = tmp_path / "t.jinja"
    template.write_text("{{ messages }}")
    assert problems(apply_chat_template=True, chat_template_path=str(template)) == []
    assert problems(chat_template_path="/nowhere.jinja") == ["--chat-template-path /nowhere.jinja: no such file"]


def test_a_fresh_start_with_one_folder_for_load_and_save(make, tmp_path):
    args = make(load=str(tmp_path / "ckpt"), save=str(tmp_path / "ckpt"), save_interval=1)
    assert args.load is None
    assert args.derived["load"] == "no checkpoint is there yet: a fresh start"


def test_a_resume_with_one_folder(make, tmp_path):
    folder = tmp_path / "ckpt"
    iteration = write_checkpoint(folder)
    assert make(load=str(folder), save=str(folder)).load == str(folder)
    assert make(load=str(iteration)).load == str(iteration)


@pytest.mark.parametrize(
    ("recorded", "said"),
    [
        ({"config": CONFIG | {"num_hidden_layers": 3}}, "num_hidden_layers is 2 here and 3 in the checkpoint"),
        ({"config": CONFIG | {"model_type": "llama"}}, "model_type is qwen3 here and llama in the checkpoint"),
        ({"tensors": {"embed.weight": [9, 4]}}, "embed.weight has shape [9, 4] instead of [8, 4]"),
    ],
)
def test_the_checkpoint_of_another_model_is_told_with_both_names_and_the_way_out(
    problems, tmp_path, model, recorded, said
):
    tensor = {"embed.weight": {"dtype": "F32", "shape": [8, 4], "data_offsets": [0, 128]}}
    header = json.dumps({"__metadata__": {}, **tensor}).encode()
    (model / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header + bytes(128))
    checkpoint = write_checkpoint(tmp_path / "ckpt", **recorded)
    (problem,) = problems(load=str(tmp_path / "ckpt"))
    assert problem.startswith(f"--load: {checkpoint} is a checkpoint of another model than --hf-checkpoint {model}: ")
    assert said in problem
    assert "Set --hf-checkpoint to the model that the checkpoint was trained from (/models/first)" in problem
    assert problems(load=str(tmp_path / "ckpt"), debug_rollout_only=True) == [], "nothing is loaded"


def test_what_config_json_leaves_to_its_defaults_does_not_make_it_another_model(problems, tmp_path, model):
    config = {k: v for k, v in CONFIG.items() if k != "head_dim"} | {"num_key_value_heads": None}
    (model / "config.json").write_text(json.dumps(config))
    write_checkpoint(tmp_path / "ckpt", tensors={"renamed.weight": [1]})
    assert problems(load=str(tmp_path / "ckpt")) == []


def test_a_damaged_checkpoint_is_told_before_anything_starts(problems, tmp_path):
    write_checkpoint(tmp_path / "ckpt", 2)
    checkpoint = write_checkpoint(tmp_path / "ckpt", 3)
    (checkpoint / "model.json").write_text("{}")
    (problem,) = problems(load=str(tmp_path / "ckpt"))
    assert problem.startswith(f"--load {tmp_path}/ckpt: {checkpoint} is damaged: model.json has 2 bytes")
    assert "Other checkpoints there: [2]" in problem


@pytest.mark.parametrize(
    ("prepare", "said"),
    [
        (lambda p: None, "no such folder"),
        (lambda p: p.mkdir(), "holds no finished checkpoint"),
        (lambda p: write_model(p), "is a Hugging Face directory"),
    ],
)
def test_a_load_that_cannot_be_resumed(problems, tmp_path, prepare, said):
    folder = tmp_path / "ckpt"
    prepare(folder)
    (problem,) = problems(load=str(folder))
    assert problem.startswith(f"--load {folder}") and said in problem


def test_an_output_below_a_file(problems, tmp_path):
    (tmp_path / "file").write_text("")
    assert problems(save=str(tmp_path / "file" / "deep")) == [
        f"--save {tmp_path}/file/deep: {tmp_path}/file is a file, so the folder cannot be made"
    ]


def test_relative_paths_are_made_absolute(make, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    args = make(run_dir="runs/x", save="ckpt", hf_checkpoint="model")
    assert args.run_dir == str(tmp_path / "runs/x")
    assert args.save == str(tmp_path / "ckpt")
    assert args.hf_checkpoint == str(tmp_path / "model")


@pytest.mark.parametrize(
    ("field", "template", "said"),
    [
        ("save_debug_rollout_data", "x.pt", "must contain {rollout_id}"),
        ("save_debug_trajectory_data", "x.jsonl", "must contain {rollout_id}"),
        ("save_debug_train_data", "{rollout_id}.pt", "must contain {rollout_id} and {rank}"),
        ("save_hf", "/tmp/{step}", "only {rollout_id} can be filled in"),
        ("save_hf", "/tmp/{", "only {rollout_id} can be filled in"),
        ("load_debug_rollout_data", "{rank}.pt", "only {rollout_id} can be filled in"),
    ],
)
def test_templates_that_cannot_name_files(field, template, said, problems):
    assert any(said in p for p in problems(**{field: template}))


@pytest.mark.parametrize("template", ["/tmp/one", "/tmp/{rollout_id}", "/tmp/{rollout_id:07d}"])
def test_exports_may_share_a_folder_or_have_their_own(template, problems):
    assert problems(save_hf=template) == []
