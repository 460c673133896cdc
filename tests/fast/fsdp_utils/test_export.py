"""Weights leave the trainer under the checkpoint's names, whole, in the dtype that engines serve."""

import json
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from miles.backends.training_utils import hf_directory
from miles.backends.training_utils.model_dir import checkpoint_tensor_names
from tests.fast.fsdp_utils.jobs import make_args, make_backend, make_batch, shard_of, weights_of
from tests.helpers.tiny_models import FAMILIES, make_tiny_model


def exported(args, by_layer=False, steps=0):
    """The stream of `iter_weights` on this rank; kept until the end, as a bucket would be."""
    backend, _ = make_backend(args, by_layer=by_layer)
    for _ in range(steps):
        backend.train(shard_of(backend, make_batch()))
    return [(name, tensor) for name, tensor in backend.iter_weights()], backend.is_weight_source


@pytest.mark.parametrize("by_layer", [False, True], ids=["one group", "by layer"])
@pytest.mark.parametrize("family", FAMILIES)
def test_names_and_values_are_those_of_the_checkpoint_in_both_directions(world, models, family, by_layer):
    (stream, source), (others, other_source) = world.run(exported, make_args(models[family]), by_layer)
    assert source and not other_source
    names = [name for name, _ in stream]
    assert len(names) == len(set(names))
    assert set(names) == checkpoint_tensor_names(Path(models[family]))
    assert [name for name, _ in others] == names
    saved = load_file(Path(models[family]) / "model.safetensors")
    assert all(torch.equal(tensor, saved[name]) for name, tensor in stream)


def test_training_changes_every_exported_tensor_and_sharding_does_not_change_what_is_exported(world, models):
    (one, _), _ = world.run(exported, make_args(models["qwen3_moe"]), steps=1)
    (layered, _), _ = world.run(exported, make_args(models["qwen3_moe"]), by_layer=True, steps=1)
    saved = load_file(Path(models["qwen3_moe"]) / "model.safetensors")
    assert not any(torch.equal(tensor, saved[name]) for name, tensor in one)
    layered = dict(layered)
    assert all(torch.allclose(tensor, layered[name], atol=1e-6) for name, tensor in one)


@pytest.mark.parametrize(
    ("fields", "dtype"),
    [
        ({}, torch.bfloat16),  # the checkpoint's own, which is what an engine loads
        ({"bf16": True}, torch.bfloat16),
        ({"embedded_dtype": "float32", "bf16": True}, torch.float32),
        ({"rollout_engine": "sglang", "sglang_dtype": "float16"}, torch.float16),
    ],
)
def test_tensors_come_in_the_dtype_that_engines_serve(world, models, tmp_path, fields, dtype):
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(models["qwen3"]).to(torch.bfloat16)
    make_tiny_model(tmp_path)
    model.save_pretrained(tmp_path)
    (stream, _), _ = world.run(exported, make_args(str(tmp_path), **fields))
    assert {tensor.dtype for _, tensor in stream} == {dtype}
    saved = load_file(tmp_path / "model.safetensors")
    assert all(torch.equal(tensor, saved[name].to(dtype)) for name, tensor in stream)


def export_dir(args, target, shard_bytes=None):
    backend, _ = make_backend(args)
    backend.train(shard_of(backend, make_batch()))
    hf_directory.SHARD_BYTES = shard_bytes or 5 * 10**9
    try:
        backend.export_hf(Path(target))
    finally:
        hf_directory.SHARD_BYTES = 5 * 10**9
    return weights_of(backend)


@pytest.mark.parametrize("family", ["qwen2", "qwen3_moe"])
def test_an_exported_directory_loads_as_a_model_with_the_trained_weights(world, models, tmp_path, family):
    import transformers

    target = tmp_path / "hf" / "3"
    trained = world.run(export_dir, make_args(models[family]), str(target))[0]
    saved = load_file(target / "model.safetensors")
    assert saved.keys() == trained.keys() and all(torch.equal(saved[n], t) for n, t in trained.items())
    _, info = transformers.AutoModelForCausalLM.from_pretrained(target, output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"]
    assert transformers.AutoTokenizer.from_pretrained(target).eos_token == "<|im_end|>"
    assert transformers.GenerationConfig.from_pretrained(target).eos_token_id == 2
    assert sorted(p.name for p in target.parent.iterdir()) == ["3"]


def test_large_exports_are_cut_into_files_with_an_index(world, models, tmp_path):
    trained = world.run(export_dir, make_args(models["qwen3"]), str(tmp_path / "hf"), 40_000)[0]
    index = json.loads((tmp_path / "hf" / "model.safetensors.index.json").read_text())
    files = sorted(set(index["weight_map"].values()))
    assert len(files) > 1 and files[0] == f"model-00001-of-{len(files):05d}.safetensors"
    for name, file in index["weight_map"].items():
        with safe_open(tmp_path / "hf" / file, "pt") as f:
            assert torch.equal(f.get_tensor(name), trained[name])
    assert index["metadata"]["total_size"] == sum(t.numel() * 4 for t in trained.values())


def failing_export(args, target):
    backend, _ = make_backend(args)
    try:
        backend.export_hf(Path(target))
    except RuntimeError as error:
        return str(error)
    return None


def test_an_export_that_fails_raises_and_leaves_nothing(world, models, tmp_path):
    (tmp_path / "file").write_text("in the way")
    errors = world.run(failing_export, make_args(models["qwen3"]), str(tmp_path / "file" / "hf"))
    assert all("export to" in e and "nothing was left" in e for e in errors)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["file"]
