"""Rows and config fields that families share."""

from __future__ import annotations

from typing import Any

from miles.backends.megatron_utils.families.family import Entry

_LAYER, _HF = "decoder.layers.{layer}.", "model.layers.{layer}."
_ATTENTION, _HF_ATTENTION = f"{_LAYER}self_attention.", f"{_HF}self_attn."
_MLP, _HF_MLP = f"{_LAYER}mlp.", f"{_HF}mlp."
_EXPERT, _HF_EXPERT = f"{_MLP}experts.{{expert}}.", f"{_HF_MLP}experts.{{expert}}."
_SHARED, _HF_SHARED = f"{_MLP}shared_experts.", f"{_HF_MLP}shared_experts."

EMBEDDING = Entry("embedding.word_embeddings.weight", ("model.embed_tokens.weight",), "vocabulary")
HEAD = Entry("output_layer.weight", ("lm_head.weight",), "vocabulary")
# The head of a model with tied embeddings: only the last of several pipeline stages has one, a copy of the embedding.
TIED_HEAD = Entry("output_layer.weight", ("model.embed_tokens.weight",), "vocabulary")

OUTSIDE_LAYERS = (EMBEDDING, HEAD, Entry("decoder.final_layernorm.weight", ("model.norm.weight",)))

LAYER_NORMS = (
    Entry(f"{_LAYER}input_layernorm.weight", (f"{_HF}input_layernorm.weight",)),
    Entry(f"{_LAYER}pre_mlp_layernorm.weight", (f"{_HF}post_attention_layernorm.weight",)),
)

ATTENTION = (
    Entry(
        f"{_ATTENTION}linear_qkv.weight",
        (f"{_HF_ATTENTION}q_proj.weight", f"{_HF_ATTENTION}k_proj.weight", f"{_HF_ATTENTION}v_proj.weight"),
        "query_key_value",
    ),
    Entry(f"{_ATTENTION}linear_proj.weight", (f"{_HF_ATTENTION}o_proj.weight",), "columns"),
)
ATTENTION_BIAS = (
    Entry(
        f"{_ATTENTION}linear_qkv.bias",
        (f"{_HF_ATTENTION}q_proj.bias", f"{_HF_ATTENTION}k_proj.bias", f"{_HF_ATTENTION}v_proj.bias"),
        "query_key_value",
    ),
)
HEAD_NORMS = (
    Entry(f"{_ATTENTION}q_layernorm.weight", (f"{_HF_ATTENTION}q_norm.weight",)),
    Entry(f"{_ATTENTION}k_layernorm.weight", (f"{_HF_ATTENTION}k_norm.weight",)),
)

LATENT_ATTENTION = (
    Entry(f"{_ATTENTION}linear_q_proj.weight", (f"{_HF_ATTENTION}q_proj.weight",), "rows"),
    Entry(f"{_ATTENTION}linear_q_down_proj.weight", (f"{_HF_ATTENTION}q_a_proj.weight",), "rows"),
    Entry(f"{_ATTENTION}q_layernorm.weight", (f"{_HF_ATTENTION}q_a_layernorm.weight",)),
    Entry(f"{_ATTENTION}linear_q_up_proj.weight", (f"{_HF_ATTENTION}q_b_proj.weight",), "rows"),
    Entry(f"{_ATTENTION}linear_kv_down_proj.weight", (f"{_HF_ATTENTION}kv_a_proj_with_mqa.weight",), "rows"),
    Entry(f"{_ATTENTION}kv_layernorm.weight", (f"{_HF_ATTENTION}kv_a_layernorm.weight",)),
    Entry(f"{_ATTENTION}linear_kv_up_proj.weight", (f"{_HF_ATTENTION}kv_b_proj.weight",), "rows"),
    Entry(f"{_ATTENTION}linear_proj.weight", (f"{_HF_ATTENTION}o_proj.weight",), "columns"),
)


def _gated(megatron: str, hf: str) -> tuple[Entry, ...]:
    """A gated MLP: gate and up projection in one matrix, the down projection in another."""
    gate_up = (f"{hf}gate_proj.weight", f"{hf}up_proj.weight")
    return (
        Entry(f"{megatron}linear_fc1.weight", gate_up, "gate_up"),
        Entry(f"{megatron}linear_fc2.weight", (f"{hf}down_proj.weight",), "columns"),
    )


MLP = _gated(_MLP, _HF_MLP)
EXPERTS = (Entry(f"{_MLP}router.weight", (f"{_HF_MLP}gate.weight",)), *_gated(_EXPERT, _HF_EXPERT))
SHARED_EXPERTS = _gated(_SHARED, _HF_SHARED)
ROUTER_BIAS = (Entry(f"{_MLP}router.expert_bias", (f"{_HF_MLP}gate.e_score_correction_bias",)),)

# Old checkpoints store what is computed from the config.
COMPUTED = (f"{_HF_ATTENTION}rotary_emb.inv_freq",)


def decoder_fields(config: Any) -> dict[str, Any]:
    """Fields of every family here: pre-norm decoders with RMSNorm, rotary positions and gated MLPs without biases."""
    import torch.nn.functional as F

    return {
        "num_layers": config.num_hidden_layers,
        "hidden_size": config.hidden_size,
        "ffn_hidden_size": config.intermediate_size,
        "num_attention_heads": config.num_attention_heads,
        "num_query_groups": config.num_key_value_heads,
        "kv_channels": getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads,
        "normalization": "RMSNorm",
        "layernorm_epsilon": config.rms_norm_eps,
        "gated_linear_unit": True,
        "activation_func": F.silu,
        "add_bias_linear": False,
        "attention_dropout": config.attention_dropout or 0.0,
        "hidden_dropout": 0.0,
    }


def decoder_problems(config: Any) -> list[str]:
    """What a config of such a decoder may ask for and would not get."""
    problems = []
    if config.hidden_act != "silu":
        problems.append(f"hidden_act {config.hidden_act} (only silu)")
    window, layers = getattr(config, "sliding_window", None), getattr(config, "layer_types", None)
    if window and (layers is None or "sliding_attention" in layers):
        problems.append(f"sliding_window {window}")
    return problems


def output_bias_problems(config: Any) -> list[str]:
    """Families in which `attention_bias` gives the output projection a bias too, which Megatron has for all linears or none."""
    names = [name for name in ("attention_bias", "mlp_bias") if getattr(config, name, False)]
    return [f"{name} true (biases beyond those of query, key and value)" for name in names]
