"""The forward pass against transformers, and directories that cannot be served."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from miles.backends.embedded_engine.model_config import ModelError, load_model_config
from miles.backends.embedded_engine.weights import WeightError, Weights, load_directory
from tests.fast.embedded_engine.conftest import make_model, make_request, make_scheduler, prompt, run
from tests.helpers.tiny_models import FAMILIES, make_tiny_model


def reference_logprobs(path: Path, tokens: list[int], temperature: float = 1.0) -> torch.Tensor:
    """Log-probs of tokens[1:] by one full forward pass of transformers."""
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    with torch.inference_mode():
        logp = torch.log_softmax(model(torch.tensor([tokens])).logits[0, :-1] / temperature, -1)
    return logp.gather(1, torch.tensor(tokens[1:])[:, None])[:, 0]


@pytest.mark.parametrize("family", FAMILIES)
def test_sampled_logprobs_equal_a_full_forward_pass(family, model_dirs):
    ids = prompt(100)
    (request,) = run(make_scheduler(model_dirs[family]), make_request(ids, max_new_tokens=60, temperature=0.7))
    expected = reference_logprobs(model_dirs[family], ids + request.output_ids, temperature=0.7)[len(ids) - 1 :]
    assert torch.tensor(request.output_logprobs) == pytest.approx(expected, abs=1e-4)
    assert len(set(request.output_ids)) > 10, "a model that repeats itself tests nothing"


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_type": "linear", "factor": 4.0, "rope_theta": 10000.0},
        {
            "rope_type": "llama3", "rope_theta": 10000.0, "factor": 8.0, "low_freq_factor": 1.0,
            "high_freq_factor": 4.0, "original_max_position_embeddings": 64,
        },
    ],
    ids=["linear", "llama3"],
)  # fmt: skip
def test_scaled_rope(rope, tmp_path):
    path = make_tiny_model(tmp_path, "llama", rope_parameters=rope, initializer_range=0.15)
    ids = prompt(300)
    request = make_request(ids, max_new_tokens=0, logprob_start_len=0)
    run(make_scheduler(path), request)
    expected = reference_logprobs(path, ids)
    assert torch.tensor(request.input_logprobs[1:]) == pytest.approx(expected, abs=1e-4)


def test_biases_and_untied_odd_sizes(tmp_path):
    path = make_tiny_model(
        tmp_path, "llama", attention_bias=True, mlp_bias=True, num_attention_heads=6, num_key_value_heads=2, hidden_size=48,
        head_dim=8, intermediate_size=72, initializer_range=0.15,
    )  # fmt: skip
    file = next(path.glob("*.safetensors"))
    tensors = load_file(file)
    save_file({n: t + 0.1 if n.endswith("bias") else t for n, t in tensors.items()}, file, {"format": "pt"})
    ids = prompt(70)
    request = make_request(ids, max_new_tokens=0, logprob_start_len=0)
    run(make_scheduler(path), request)
    assert torch.tensor(request.input_logprobs[1:]) == pytest.approx(reference_logprobs(path, ids), abs=1e-4)


@pytest.mark.parametrize("family", FAMILIES)
def test_weights_are_read_back_as_the_checkpoint_has_them(family, model_dirs):
    stored = load_file(next(model_dirs[family].glob("*.safetensors")))
    served = dict(make_model(model_dirs[family]).weights.named_tensors())
    assert served.keys() == stored.keys()
    assert all(torch.equal(served[name], stored[name]) for name in stored)


def test_fused_expert_tensors_are_written_as_single_experts(model_dirs):
    weights = make_model(model_dirs["qwen3_moe"]).weights
    name = "model.layers.1.mlp.experts.gate_up_proj"
    value = torch.randn(weights.find(name).shape)
    weights.write(name, value)
    weights.seal()
    assert torch.equal(weights.find(name).read(), value)
    assert torch.equal(dict(weights.named_tensors())["model.layers.1.mlp.experts.2.up_proj.weight"], value[2, 16:])


# ---- directories that cannot be served -------------------------------------------------------------------------------


def edit_config(path: Path, **changes) -> Path:
    file = path / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))
    return path


def test_every_unsupported_feature_is_named_at_once(tmp_path):
    path = edit_config(
        make_tiny_model(tmp_path),
        architectures=["GPT2LMHeadModel"],
        use_sliding_window=True,
        hidden_act="gelu",
        rope_parameters={"rope_type": "yarn", "rope_theta": 1e4},
        quantization_config={"bits": 4},
    )
    with pytest.raises(ModelError) as error:
        load_model_config(path)
    for word in ("GPT2LMHeadModel", "sliding-window", "gelu", "yarn", "quantization_config"):
        assert word in str(error.value)


def test_a_directory_without_weights_or_config(tmp_path):
    with pytest.raises(ModelError, match=r"config\.json is missing"):
        load_model_config(tmp_path)
    with pytest.raises(ModelError, match="not a directory"):
        load_model_config(tmp_path / "absent")
    path = make_tiny_model(tmp_path / "m")
    next(path.glob("*.safetensors")).unlink()
    config = load_model_config(path)
    with pytest.raises(ModelError, match=r"no \*\.safetensors"):
        load_directory(Weights(config, torch.device("cpu"), torch.float32), path)


def test_missing_unknown_and_ill_shaped_tensors_are_all_named(tmp_path):
    path = make_tiny_model(tmp_path)
    file = next(path.glob("*.safetensors"))
    tensors = load_file(file)
    del tensors["model.norm.weight"]
    tensors["model.layers.9.mlp.up_proj.weight"] = torch.zeros(2, 2)
    tensors["model.embed_tokens.weight"] = torch.zeros(3, 32)
    save_file(tensors, file, {"format": "pt"})
    weights = Weights(load_model_config(path), torch.device("cpu"), torch.float32)
    with pytest.raises(WeightError) as error:
        load_directory(weights, path)
    for word in ("model.norm.weight: missing", "layers.9.mlp.up_proj.weight", "embed_tokens.weight: shape (3, 32)"):
        assert word in str(error.value)
    assert len(weights.missing) == len(weights.slots), "nothing may be loaded from a directory that does not fit"
