"""Weights go into every layout and come out as they were; what does not match is told, all at once."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from miles.backends.megatron_utils.weights.name_map import NameMapError
from miles.utils.digest import tensor_digest
from tests.fast.megatron_utils.architectures import make_model
from tests.fast.megatron_utils.weight_jobs import (
    checkpoint_names,
    exported,
    exported_after,
    share_read,
    units,
    without_rows,
    written,
)


def stored(directory):
    tensors = {}
    for file in directory.glob("*.safetensors"):
        tensors |= load_file(file)
    return tensors


def digests(tensors):
    return {name: tensor_digest(tensor) for name, tensor in tensors.items()}


def merged(parts):
    """What all sources export; each tensor from one."""
    parts = [part for part in parts if part is not None]
    whole = {name: digest for part in parts for name, digest in part.items()}
    assert len(whole) == sum(len(part) for part in parts)
    return whole


ON_TWO = [
    ("llama", {"tp": 2}),
    ("qwen2", {"tp": 2}),
    ("qwen2", {"pp": 2}),
    ("qwen3", {"pp": 2, "vpp": 2}),
    ("qwen3_odd_vocabulary", {"tp": 2}),
    ("qwen3_one_group", {"tp": 2}),
    ("qwen3_moe", {"tp": 2}),
    ("qwen3_moe_mixed", {"pp": 2}),
    ("qwen3_moe", {"ep": 2}),
    ("qwen3_moe", {"tp": 2, "etp": 2}),
    ("deepseek_v3", {"tp": 2, "ep": 2}),
    ("deepseek_v3_yarn", {"pp": 2}),
    ("glm4_moe", {"ep": 2}),
    ("glm4_moe_lite", {"tp": 2}),
]
ON_FOUR = [
    ("qwen2", {"tp": 2, "pp": 2}),
    ("qwen3_moe", {"tp": 2, "ep": 2, "etp": 2}),
    ("deepseek_v3", {"tp": 2, "pp": 2, "ep": 2}),
    ("deepseek_v3", {"ep": 4}),
    ("qwen3", {"tp": 2}),
]


@pytest.mark.parametrize("name,layout", ON_TWO, ids=str)
def test_weights_come_out_as_they_went_in(pair, tmp_path, name, layout):
    make_model(tmp_path, name)
    assert merged(pair.run(exported, str(tmp_path), layout)) == digests(stored(tmp_path))


@pytest.mark.parametrize("name,layout", ON_FOUR, ids=str)
def test_weights_come_out_as_they_went_in_on_four_ranks(quad, tmp_path, name, layout):
    make_model(tmp_path, name)
    parts = quad.run(exported, str(tmp_path), layout)
    assert merged(parts) == digests(stored(tmp_path))
    assert sum(part is not None for part in parts) == layout.get("pp", 1)


def test_padding_of_the_vocabulary_stays_inside(pair, tmp_path):
    make_model(tmp_path, "qwen3")
    flags = {"make_vocab_size_divisible_by": 128}
    assert merged(pair.run(exported, str(tmp_path), {"tp": 2}, **flags)) == digests(stored(tmp_path))


def test_weights_are_exported_in_the_dtype_that_engines_serve(pair, tmp_path):
    make_model(tmp_path, "qwen3_moe")
    wanted = digests({name: tensor.bfloat16() for name, tensor in stored(tmp_path).items()})
    assert merged(pair.run(exported, str(tmp_path), {"tp": 2, "ep": 2}, torch.bfloat16)) == wanted


def test_each_rank_reads_its_own_part(pair, tmp_path):
    make_model(tmp_path, "qwen3_moe")
    for layout in ({"tp": 2, "ep": 2}, {"pp": 2}):
        assert max(pair.run(share_read, str(tmp_path), layout)) < 0.6


def test_files_of_fused_experts_and_of_many_shards_are_read(pair, tmp_path):
    make_model(tmp_path / "plain", "qwen3_moe", max_shard_size="100kB")
    assert len(list((tmp_path / "plain").glob("*.safetensors"))) > 2
    tensors = stored(tmp_path / "plain")
    fused = {name: tensor for name, tensor in tensors.items() if ".experts." not in name}
    for layer in range(4):
        prefix = f"model.layers.{layer}.mlp.experts."
        gates, ups, downs = (
            [tensors[f"{prefix}{expert}.{part}_proj.weight"] for expert in range(4)] for part in ("gate", "up", "down")
        )
        fused[f"{prefix}gate_up_proj"] = torch.cat([torch.stack(gates), torch.stack(ups)], 1)
        fused[f"{prefix}down_proj"] = torch.stack(downs)
    (tmp_path / "fused").mkdir()
    save_file(fused, tmp_path / "fused" / "model.safetensors")
    (tmp_path / "fused" / "config.json").write_text((tmp_path / "plain" / "config.json").read_text())
    for folder, layout in (("plain", {"pp": 2}), ("fused", {"ep": 2}), ("fused", {"tp": 2, "etp": 2})):
        assert merged(pair.run(exported, str(tmp_path / folder), layout)) == digests(tensors)


def test_projections_that_engines_fuse_travel_together(pair, tmp_path):
    make_model(tmp_path, "deepseek_v3")
    ends = ("q_a_proj.weight", "kv_a_proj_with_mqa.weight")
    wanted = [[f"model.layers.{layer}.self_attn.{end}" for end in ends] for layer in range(4)]
    assert pair.run(units, str(tmp_path))[0] == wanted


def test_an_exported_directory_is_the_one_that_was_loaded(pair, tmp_path):
    make_model(tmp_path / "in", "deepseek_v3")
    extra = {"model.layers.4.eh_proj.weight": torch.randn(3, 3)}  # of the layer for multi-token prediction
    save_file(stored(tmp_path / "in") | extra, tmp_path / "in" / "model.safetensors")
    (tmp_path / "in" / "tokenizer.json").write_text("{}")
    pair.run(written, str(tmp_path / "in"), {"pp": 2, "ep": 1}, str(tmp_path / "out"), 50_000)
    assert digests(stored(tmp_path / "out")) == digests(stored(tmp_path / "in"))
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    assert set(index["weight_map"]) == set(stored(tmp_path / "in"))
    for name in ("config.json", "tokenizer.json"):
        assert (tmp_path / "out" / name).read_bytes() == (tmp_path / "in" / name).read_bytes()


def test_an_export_that_fails_says_so_on_every_rank_and_leaves_nothing(pair, tmp_path):
    make_model(tmp_path / "in", "qwen3")
    (tmp_path / "file").write_text("")
    for _ in range(2):  # the world is whole afterwards
        with pytest.raises(RuntimeError, match=r"export to .* failed, nothing was left there: NotADirectoryError"):
            pair.run(written, str(tmp_path / "in"), {"pp": 2}, str(tmp_path / "file" / "out"))


def test_tensors_that_only_one_side_has_are_all_listed(pair, tmp_path):
    make_model(tmp_path, "qwen3")
    tensors = stored(tmp_path)
    tensors["model.layers.3.extra.weight"] = tensors.pop("model.layers.3.self_attn.q_norm.weight")
    tensors["model.norm.bias"] = tensors.pop("model.norm.weight")
    tensors["model.layers.0.mlp.down_proj.weight"] = torch.zeros(32, 60)
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(NameMapError) as error:
        pair.run(exported, str(tmp_path), {"pp": 2})
    lines = str(error.value).splitlines()[1:]
    assert [line.strip() for line in lines] == [
        "the checkpoint lacks model.layers.3.self_attn.q_norm.weight",
        "the checkpoint lacks model.norm.weight",
        "the model has no use for the checkpoint's model.layers.3.extra.weight",
        "the model has no use for the checkpoint's model.norm.bias",
        "model.layers.0.mlp.down_proj.weight: [32, 60] on each rank, the model has [32, 64]",
    ]


def test_a_table_without_rows_for_some_tensors_is_not_used(pair, tmp_path):
    make_model(tmp_path, "qwen3")
    with pytest.raises(NameMapError) as error:
        pair.run(without_rows, str(tmp_path), "q_layernorm.weight", "output_layer.weight")
    for text in (
        "no row of the Qwen3 name map is for the model's decoder.layers.3.self_attention.q_layernorm.weight",
        "no row of the Qwen3 name map is for the model's output_layer.weight",
        "the model has no use for the checkpoint's lm_head.weight",
    ):
        assert text in str(error.value)


OUTSIDE = {"decoder.final_layernorm.weight"}
TRANSFORMER_ENGINE = {
    "qwen3_moe_mixed": {
        "self_attention.linear_qkv.layer_norm_weight",
        "self_attention.q_layernorm.weight",
        "self_attention.k_layernorm.weight",
        "mlp.linear_fc1.layer_norm_weight",
        "pre_mlp_layernorm.weight",
    },
    "deepseek_v3": {
        "input_layernorm.weight",
        "self_attention.linear_q_up_proj.layer_norm_weight",
        "self_attention.linear_kv_up_proj.layer_norm_weight",
        "mlp.linear_fc1.layer_norm_weight",
        "pre_mlp_layernorm.weight",
    },
}


@pytest.mark.parametrize("name", TRANSFORMER_ENGINE)
def test_checkpoints_of_local_layers_have_the_names_of_transformer_engine(pair, tmp_path, name):
    make_model(tmp_path, name)
    assert pair.run(checkpoint_names, str(tmp_path))[0] == TRANSFORMER_ENGINE[name] | OUTSIDE


def test_another_model_is_loaded_into_the_same_layout_if_it_is_alike(pair, tmp_path):
    make_model(tmp_path / "actor", "qwen2")
    make_model(tmp_path / "ref", "qwen2")
    changed = {name: tensor + 1 for name, tensor in stored(tmp_path / "ref").items()}
    save_file(changed, tmp_path / "ref" / "model.safetensors")
    assert merged(pair.run(exported_after, str(tmp_path / "actor"), {"pp": 2}, str(tmp_path / "ref"))) == digests(
        changed
    )
    changed["model.norm.weight"] = torch.zeros(31)
    changed["other"] = changed.pop("model.layers.0.mlp.up_proj.weight")
    save_file(changed, tmp_path / "ref" / "model.safetensors")
    with pytest.raises(NameMapError, match=r"is not a model like") as error:
        pair.run(exported_after, str(tmp_path / "actor"), {"pp": 2}, str(tmp_path / "ref"))
    assert "it lacks model.layers.0.mlp.up_proj.weight" in str(error.value)
    assert "model.norm.weight has shape [31] instead of [32]" in str(error.value)
