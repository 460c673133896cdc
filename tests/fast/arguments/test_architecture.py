"""Architecture flags of Megatron launchers against the Hugging Face config."""

from __future__ import annotations

import pytest

from .conftest import write_model

AGREEING = {
    "num_layers": 2,
    "hidden_size": 32,
    "ffn_hidden_size": 64,
    "num_attention_heads": 4,
    "num_query_groups": 2,
    "group_query_attention": True,
    "kv_channels": 8,
    "vocab_size": 320,
    "norm_epsilon": 1e-6,
    "rotary_base": 10000,
    "untie_embeddings_and_output_weights": True,
    "swiglu": True,
    "attention_dropout": 0.0,
    "add_bias_linear": False,
    "qk_layernorm": True,
    "normalization": "RMSNorm",
}


def test_flags_that_agree_are_accepted(problems):
    assert problems(**AGREEING) == []


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"num_layers": 3}, "--num-layers 3 (config: 2)"),
        ({"kv_channels": 16}, "--kv-channels 16 (config: 8)"),
        ({"norm_epsilon": 1e-5}, "--norm-epsilon 1e-05 (config: 1e-06)"),
        ({"rotary_base": 1e6}, "--rotary-base 1000000.0 (config: 10000.0)"),
    ],
)
def test_a_flag_that_disagrees(changes, said, problems):
    (problem,) = problems(**changes)
    assert said in problem


def test_all_differences_come_in_one_message(problems):
    (problem,) = problems(num_layers=3, hidden_size=64)
    assert "--num-layers 3 (config: 2)" in problem and "--hidden-size 64 (config: 32)" in problem


def test_tied_embeddings_contradict_an_untied_head(problems, tmp_path):
    tied = write_model(tmp_path / "tied", tie_word_embeddings=True)
    (problem,) = problems(hf_checkpoint=str(tied), untie_embeddings_and_output_weights=True)
    assert "--untie-embeddings-and-output-weights True (config: False)" in problem


def test_a_head_size_that_follows_from_the_others(problems, tmp_path):
    model = write_model(tmp_path / "m", head_dim=None)
    assert problems(hf_checkpoint=str(model), kv_channels=8) == []


def test_experts_of_a_multimodal_model(problems, tmp_path):
    model = write_model(tmp_path / "m", text_config={"num_experts": 4, "num_experts_per_tok": 2})
    assert problems(hf_checkpoint=str(model), num_experts=4) == []
    assert "--moe-router-topk 1 (config: 2)" in problems(hf_checkpoint=str(model), moe_router_topk=1)[0]


def test_what_the_config_does_not_say_cannot_contradict(problems):
    assert problems(q_lora_rank=8) == []
