"""Canonical names are the same for both layer implementations, and every family's table reads both ways."""

import re

import pytest

from miles.backends.megatron_utils.families.registry import FAMILIES, family_of
from miles.backends.megatron_utils.weights.canonical import canonical_name
from miles.backends.megatron_utils.weights.name_map import NameMap

LAYERS = [4, 5]  # of a second stage

SAME = [
    ("self_attention.linear_qkv.layer_norm_weight", "input_layernorm.weight"),
    ("mlp.linear_fc1.layer_norm_weight", "pre_mlp_layernorm.weight"),
    ("self_attention.linear_q_up_proj.layer_norm_weight", "self_attention.q_layernorm.weight"),
    ("self_attention.linear_kv_up_proj.layer_norm_weight", "self_attention.kv_layernorm.weight"),
    ("mlp.experts.linear_fc1.weight1", "mlp.experts.local_experts.1.linear_fc1.weight"),
    ("mlp.experts.linear_fc2.weight0", "mlp.experts.local_experts.0.linear_fc2.weight"),
    ("mlp.shared_experts.linear_fc1.weight", "mlp.shared_experts.linear_fc1.weight"),
    ("self_attention.q_layernorm.weight", "self_attention.q_layernorm.weight"),
]


@pytest.mark.parametrize(("engine", "local"), SAME)
def test_transformer_engine_and_local_layers_have_one_name(engine, local):
    names = {canonical_name(f"decoder.layers.1.{name}", LAYERS, 8) for name in (engine, local)}
    ((name, expert),) = names
    assert name.startswith("decoder.layers.5.")
    if "local_experts" in local:
        assert f".experts.{8 + expert}." in name and expert == int(re.search(r"\d", local.split("experts.")[-1])[0])
    else:
        assert expert is None and name == f"decoder.layers.5.{local}"


def test_names_outside_layers_stay():
    assert canonical_name("embedding.word_embeddings.weight", LAYERS, 0) == ("embedding.word_embeddings.weight", None)


@pytest.mark.parametrize("family", FAMILIES, ids=lambda f: f.name)
def test_each_row_is_found_by_its_own_name_and_no_tensor_is_claimed_twice(family):
    name_map = NameMap(family, 8, tied=False)
    claimed = []
    for entry in family.entries:
        mapping = name_map.of(entry.megatron.format(layer=7, expert=13))
        assert mapping is not None and mapping.entry == entry
        claimed += mapping.hf_names()
    assert len(claimed) == len(set(claimed))
    assert not any(name_map.is_unused(name) for name in claimed)


def test_only_layers_beyond_the_last_are_for_multi_token_prediction():
    name_map = NameMap(family_of_type("deepseek_v3"), 61, tied=False)
    assert name_map.is_unused("model.layers.61.eh_proj.weight")
    assert not name_map.is_unused("model.layers.60.eh_proj.weight")


def test_a_tied_head_may_be_stored_or_not():
    name_map = NameMap(family_of_type("qwen2"), 4, tied=True)
    assert name_map.is_unused("lm_head.weight") and not name_map.is_carried("lm_head.weight")
    assert name_map.of("output_layer.weight").hf_names() == ("model.embed_tokens.weight",)


def test_a_model_name_of_older_spelling_chooses_the_family():
    assert family_of(tiny("Qwen3MoeConfig"), "qwen3moe").model_types == ("qwen3_moe",)
    with pytest.raises(ValueError, match=r"'gpt9' of --model-name.*deepseek_v3"):
        family_of(tiny("Qwen3MoeConfig"), "gpt9")


def test_a_quantised_checkpoint_is_refused_with_the_way_out():
    with pytest.raises(ValueError, match=r"quantization_config .convert the checkpoint to bfloat16 first"):
        family_of(tiny("Qwen3Config", quantization_config={"quant_method": "fp8"}))


def family_of_type(kind):
    return next(family for family in FAMILIES if kind in family.model_types)


def tiny(kind, **fields):
    import transformers

    return getattr(transformers, kind)(**fields)
