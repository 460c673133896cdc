"""The conversion scripts as their user runs them: to torch_dist and back, the same tensors."""

import shutil
import subprocess
import sys
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from tests.helpers.tiny_models import make_tiny_model

SCRIPTS = Path(__file__).resolve().parents[3] / "scripts"


def run(script: str, *arguments: object) -> subprocess.CompletedProcess:
    command = [sys.executable, str(SCRIPTS / script), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=280, check=False)


def test_there_and_back_is_the_same_directory(tmp_path):
    model = make_tiny_model(tmp_path / "model", "qwen3_moe")
    file = "model.safetensors"
    save_file({name: tensor.bfloat16() for name, tensor in load_file(model / file).items()}, model / file)
    flags = ("--swiglu", "--num-layers", 2, "--num-experts", 4, "--normalization", "RMSNorm", "--disable-bias-linear")
    done = run("convert_hf_to_torch_dist.py", "--hf-checkpoint", model, "--save", tmp_path / "dist", *flags)
    assert done.returncode == 0, done.stderr
    assert done.stdout.endswith(f"wrote {tmp_path}/dist/iter_0000000\n")
    given = ("--input-dir", tmp_path / "dist", "--origin-hf-dir", model, "--output-dir", tmp_path / "out")
    done = run("convert_torch_dist_to_hf.py", *given)
    assert done.returncode == 0, done.stderr
    before, after = load_file(model / file), load_file(tmp_path / "out" / file)
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) and after[name].dtype == torch.bfloat16 for name in before)
    assert (tmp_path / "out" / "tokenizer.json").read_bytes() == (model / "tokenizer.json").read_bytes()

    done = run("convert_torch_dist_to_hf.py", *given)
    assert done.returncode == 2 and "exists: choose another" in done.stderr
    other = make_tiny_model(tmp_path / "other", "qwen3_moe", num_hidden_layers=3)
    shutil.rmtree(tmp_path / "out")
    done = run("convert_torch_dist_to_hf.py", *given[:3], other, *given[4:])
    assert done.returncode == 1 and "num_hidden_layers is 3 here and 2 in the checkpoint" in done.stderr
    assert not (tmp_path / "out").exists()


def test_flags_that_contradict_the_model_are_told_before_anything_is_written(tmp_path):
    model = make_tiny_model(tmp_path / "model", "qwen3")
    done = run(
        "convert_hf_to_torch_dist.py",
        "--hf-checkpoint",
        model,
        "--save",
        tmp_path / "dist",
        "--num-layers",
        3,
        "--add-qkv-bias",
    )
    assert done.returncode == 2
    assert "--num-layers 3 (config: 2)" in done.stderr and "--add-qkv-bias True (config: False)" in done.stderr
    assert not (tmp_path / "dist").exists()
