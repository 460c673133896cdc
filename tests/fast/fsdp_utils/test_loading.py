"""A Hugging Face directory in, the same function out."""

import json
import shutil
from pathlib import Path

import pytest
import torch

from miles.backends.fsdp_utils.loading import fsdp_modules
from miles.backends.training_utils.model_dir import ModelDirError, check_model_dir
from tests.fast.fsdp_utils.jobs import make_args, make_backend, make_batch, shard_of
from tests.helpers.tiny_models import FAMILIES, make_tiny_model


def scores_and_reference(args, by_layer=False, reference_attention=None):
    """The largest difference between the trainer's log-probs and transformers' own, on this rank's samples."""
    import transformers

    backend, start = make_backend(args, by_layer=by_layer)
    shard = shard_of(backend, make_batch())
    plain = transformers.AutoModelForCausalLM.from_pretrained(
        args.hf_checkpoint, attn_implementation=reference_attention
    )
    worst = 0.0
    for i, scored in enumerate(backend.score(shard, "actor")):
        tokens, n = torch.tensor(shard.columns["tokens"][i]), shard.columns["response_lengths"][i]
        assert scored.shape == (n,) and scored.dtype == torch.float32
        with torch.no_grad():
            logits = plain(tokens[None]).logits[0, len(tokens) - n - 1 : -1] / args.rollout_temperature
        expected = torch.log_softmax(logits, -1).gather(-1, tokens[-n:, None])[:, 0]
        worst = max(worst, float((scored - expected).abs().max()))
    return worst, start, len(fsdp_modules(backend.actor.module))


@pytest.mark.parametrize("sharding", ["one group", "by layer"])
@pytest.mark.parametrize("family", FAMILIES)
def test_log_probs_equal_those_of_transformers(world, models, family, sharding):
    args = make_args(models[family], rollout_temperature=0.7)
    for worst, start, groups in world.run(scores_and_reference, args, by_layer=sharding == "by layer"):
        assert worst < 2e-6 and start == 0
        assert (groups == 1) == (sharding == "one group")


@pytest.mark.parametrize("fields", [{"qkv_format": "bshd"}, {"attn_implementation": "eager"}, {"dp_replicate_size": 2}])
def test_log_probs_do_not_depend_on_layout_kernel_or_mesh(world, models, fields):
    for worst, *_ in world.run(scores_and_reference, make_args(models["qwen3"], **fields)):
        assert worst < 2e-6


_OTHERS = {
    # Scaled logits: the head is more than a projection.
    "Granite": {"logits_scaling": 3.0},
    # Attention logits are capped: no fused kernel.
    "Gemma2": {"attn_logit_softcapping": 0.5, "final_logit_softcapping": 0.3, "query_pre_attn_scalar": 8},
    # Every layer sees four tokens only.
    "Mistral": {"sliding_window": 4},
    # Attention sinks.
    "GptOss": {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 4},
    # Linear attention: rows cannot be packed.
    "Qwen3Next": {
        "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "shared_expert_intermediate_size": 16,
        "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 8,
        "num_hidden_layers": 4,
    },
}  # fmt: skip


@pytest.mark.parametrize("kind", _OTHERS)
def test_architectures_with_ways_of_their_own_score_alike(world, tmp_path, kind):
    import transformers

    config = getattr(transformers, f"{kind}Config")(
        **{"vocab_size": 320, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "pad_token_id": 0}
        | {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "bos_token_id": None, "eos_token_id": 2}
        | _OTHERS[kind]
    )
    make_tiny_model(tmp_path, "qwen3")  # for its tokenizer
    config._attn_implementation = "eager"
    torch.manual_seed(0)
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    for worst, *_ in world.run(scores_and_reference, make_args(str(tmp_path)), reference_attention="eager"):
        assert worst < 3e-6


def break_dir(source, target, how):
    shutil.copytree(source, target)
    if how == "weights":
        (target / "model.safetensors").unlink()
    elif how == "tokenizer":
        (target / "tokenizer.json").unlink()
    elif how == "config":
        (target / "config.json").unlink()
    elif how == "shard":
        (target / "model.safetensors").rename(target / "model-00001-of-00002.safetensors")
        index = {"weight_map": {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}}
        (target / "model.safetensors.index.json").write_text(json.dumps(index))
    return target


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ("weights", "missing weights"),
        ("tokenizer", "missing a tokenizer"),
        ("config", r"missing config\.json"),
        ("shard", "missing weight file model-00002-of-00002.*listed in the index"),
    ],
)
def test_an_incomplete_model_directory_is_refused_by_name_before_anything_is_built(models, tmp_path, how, said):
    broken = break_dir(models["qwen3"], tmp_path / "broken", how)
    with pytest.raises(ModelDirError, match=f"--hf-checkpoint .*broken: {said}"):
        check_model_dir(broken, "--hf-checkpoint")


def test_everything_that_is_missing_is_said_at_once(tmp_path):
    with pytest.raises(ModelDirError, match=r"config\.json .*weights .*tokenizer"):
        check_model_dir(tmp_path, "--hf-checkpoint")
    with pytest.raises(ModelDirError, match=r"--ref-load .*nowhere: no such directory"):
        check_model_dir(tmp_path / "nowhere", "--ref-load")


def test_a_model_directory_is_checked_when_the_trainer_is_made(world, tmp_path):
    with pytest.raises(ModelDirError, match="--hf-checkpoint"):
        world.run(make_backend, make_args(str(tmp_path)))


def rewrite_weights(directory: Path, change):
    from safetensors.torch import load_file, save_file

    tensors = load_file(directory / "model.safetensors")
    change(tensors)
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (
            lambda t: t.pop("model.layers.1.mlp.up_proj.weight"),
            r"no weights for model\.layers\.1\.mlp\.up_proj\.weight",
        ),
        (
            lambda t: t.update({"model.norm.weight": torch.ones(7)}),
            r"model\.norm\.weight has shape \(7,\), config says \(32,\)",
        ),
    ],
    ids=["missing", "wrong shape"],
)
def test_weights_that_do_not_fit_the_config_fail_on_every_rank(world, models, tmp_path, change, said):
    target = tmp_path / "model"
    shutil.copytree(models["qwen3"], target)
    rewrite_weights(target, change)
    with pytest.raises(ModelDirError, match=said):
        world.run(make_backend, make_args(str(target)))


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"dp_replicate_size": 3}, "--dp-replicate-size 3 does not divide the 2"),
        ({"train_device": "cuda"}, "--train-device cuda: this process sees no GPU"),
        ({"attn_implementation": "flash_attention_2"}, "needs a GPU: use sdpa or eager"),
        ({"lr_decay_style": "cosine", "num_rollout": None}, "--lr-decay-style cosine .*--num-epoch.*--lr-decay-iters"),
    ],
)
def test_settings_that_cannot_work_here_are_refused_with_a_way_out(world, models, fields, said):
    with pytest.raises(ValueError, match=said):
        world.run(build, make_args(models["qwen3"], **fields))


def build(args):
    make_backend(args)


def test_names_that_an_update_would_miss_are_told(solo, models, tmp_path):
    target = tmp_path / "model"
    shutil.copytree(models["qwen3"], target)
    rewrite_weights(target, lambda t: t.update({"model.layers.9.extra": torch.ones(2)}))
    said = solo.run(differing_names, make_args(str(target)))[0]
    assert said == "1 names differ: model.layers.9.extra is there and not exported"
    assert solo.run(differing_names, make_args(models["qwen3_moe"]))[0] is None


def differing_names(args):
    from miles.backends.fsdp_utils.export import names_unlike_checkpoint

    backend, _ = make_backend(args)
    return names_unlike_checkpoint(backend.actor, backend.source_dir)
