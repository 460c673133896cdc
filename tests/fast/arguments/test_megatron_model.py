"""What the Megatron trainer says about a model before anything is built."""

from __future__ import annotations

import pytest

from miles.arguments.args import Args
from miles.arguments.rules.megatron_model import problems

from .conftest import write_model

DEEPSEEK = {
    "model_type": "deepseek_v3",
    "head_dim": None,
    "num_hidden_layers": 4,
    "num_key_value_heads": 4,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 16,
    "first_k_dense_replace": 1,
    "n_group": 4,
    "topk_group": 2,
    "kv_lora_rank": 16,
    "q_lora_rank": 24,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 12,
}


@pytest.fixture
def say(tmp_path):
    """`say(config, **flags)` -> what the rule says."""

    def find(config, **flags):
        model = write_model(tmp_path / "m", **{k: v for k, v in config.items()})
        return list(
            problems(Args({"hf_checkpoint": str(model), "train_backend": "megatron", "train_device": "cpu", **flags}))
        )

    return find


def test_known_models_in_fitting_layouts_pass(say):
    assert say({}) == []
    assert say({}, tensor_model_parallel_size=4, pipeline_model_parallel_size=2) == []
    flags = {"multi_latent_attention": True, "qk_layernorm": True, "moe_shared_expert_intermediate_size": 16}
    flags |= {"moe_router_enable_expert_bias": True, "moe_layer_freq": "([0]*1+[1]*3)", "rope_type": "rope"}
    assert say(DEEPSEEK, expert_model_parallel_size=8, tensor_model_parallel_size=2, **flags) == []


def test_an_unknown_architecture_names_itself_and_what_is_known(say):
    (said,) = say({"model_type": "gpt2", "n_embd": 32})
    assert "does not know the architecture 'gpt2'" in said and "--train-backend fsdp" in said
    for known in ("llama", "qwen2", "qwen3", "qwen3_moe", "deepseek_v3", "glm4_moe", "glm4_moe_lite"):
        assert known in said


@pytest.mark.parametrize(
    ("config", "parts"),
    [
        ({"hidden_act": "gelu", "attention_bias": True}, ["hidden_act gelu", "attention_bias true"]),
        ({"use_sliding_window": True, "sliding_window": 64, "max_window_layers": 0}, ["sliding_window 64"]),
        (DEEPSEEK | {"norm_topk_prob": False, "topk_group": 4}, ["norm_topk_prob false", "topk_group 4"]),
        (
            {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}},
            ["'dynamic'", "llama3, yarn"],
        ),
    ],
)
def test_settings_that_cannot_be_built_are_named_together(say, config, parts):
    (said,) = say(config)
    for part in parts:
        assert part in said


def test_flags_that_contradict_the_model_are_listed_in_one_message(say):
    flags = {"moe_shared_expert_intermediate_size": 32, "moe_layer_freq": "[0]*2+[1]*2", "moe_router_pre_softmax": True}
    (said,) = say(DEEPSEEK, **flags)
    for part in (
        "--moe-shared-expert-intermediate-size 32 (config: 16)",
        "--moe-layer-freq [0]*2+[1]*2 (config: [0, 1, 1, 1])",
        "--moe-router-pre-softmax True (config: False)",
    ):
        assert part in said
    (said,) = say({}, qk_layernorm=False, normalization="LayerNorm", add_qkv_bias=True)
    assert "--normalization LayerNorm (config: RMSNorm)" in said and "--add-qkv-bias True (config: False)" in said


@pytest.mark.parametrize(
    ("config", "flags", "parts"),
    [
        ({}, {"tensor_model_parallel_size": 3}, ["the 4 attention heads", "the 64 columns of the MLP", "3 and 2 key-value heads"]),
        ({"num_key_value_heads": 3, "num_attention_heads": 6}, {"tensor_model_parallel_size": 2}, ["2 and 3 key-value heads"]),
        ({}, {"pipeline_model_parallel_size": 3}, ["3 does not divide the 2 layers"]),
        (DEEPSEEK, {"expert_model_parallel_size": 3}, ["3 does not divide the 8 experts"]),
        (DEEPSEEK, {"expert_tensor_parallel_size": 3}, ["3 does not divide the 16 columns of an expert"]),
        (
            DEEPSEEK | {"kv_lora_rank": 17},
            {"tensor_model_parallel_size": 2},
            ["2 does not divide the 25 columns of the key-value latent"],
        ),
        (
            DEEPSEEK,
            {"pipeline_model_parallel_size": 2, "num_virtual_stages_per_pipeline_rank": 4},
            ["4 does not divide the 2 layers of a stage"],
        ),
        (
            DEEPSEEK,
            {"pipeline_model_parallel_size": 3, "decoder_first_pipeline_num_layers": 1},
            ["3 does not divide the 4 layers, 3 of them on the other 2 stages"],
        ),
    ],
)  # fmt: skip
def test_a_layout_that_does_not_divide_names_its_flag(say, config, flags, parts):
    said = say(config, **flags)
    assert len(said) == len(parts)
    for part, text in zip(parts, said, strict=True):
        assert part in text and text.startswith("--")
