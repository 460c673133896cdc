"""DeepSeek-V3 and GLM-4.7-Flash: latent attention, and experts with sigmoid routing, groups, a balancing bias and shared experts."""

from __future__ import annotations

from typing import Any

from miles.backends.megatron_utils.families import common
from miles.backends.megatron_utils.families.family import Family

EXPERTS = (*common.EXPERTS, *common.ROUTER_BIAS, *common.SHARED_EXPERTS)


def expert_fields(config: Any) -> dict[str, Any]:
    """Sigmoid routing as DeepSeek-V3 has it (arXiv 2412.19437, section 2.1.2)."""
    fields = {
        "num_moe_experts": config.n_routed_experts,
        "moe_ffn_hidden_size": config.moe_intermediate_size,
        "moe_shared_expert_intermediate_size": config.moe_intermediate_size * config.n_shared_experts,
        "moe_router_topk": config.num_experts_per_tok,
        "moe_router_score_function": "sigmoid",
        "moe_router_enable_expert_bias": True,
        "moe_router_topk_scaling_factor": config.routed_scaling_factor,
        "moe_router_dtype": "fp32",
        "moe_layer_freq": expert_layers(config),
    }
    if (config.n_group or 1) > 1:
        fields |= {"moe_router_num_groups": config.n_group, "moe_router_group_topk": config.topk_group}
    return fields


def expert_layers(config: Any) -> list[int]:
    """1 for each layer with experts, 0 for each dense one."""
    types = getattr(config, "mlp_layer_types", None)
    if types is not None:
        return [int(kind == "sparse") for kind in types]
    return [int(i >= config.first_k_dense_replace) for i in range(config.num_hidden_layers)]


def expert_problems(config: Any) -> list[str]:
    problems = []
    if not config.norm_topk_prob:
        problems.append("norm_topk_prob false (sigmoid scores are always normalised)")
    if (config.n_group or 1) > 1 and config.num_experts_per_tok // config.topk_group != 2:
        problems.append(
            f"num_experts_per_tok {config.num_experts_per_tok} with topk_group {config.topk_group}: groups are scored by "
            "their 2 best experts, Megatron takes num_experts_per_tok / topk_group of them"
        )
    return problems


def _fields(config: Any) -> dict[str, Any]:
    rope = config.rope_parameters or {}
    fields: dict[str, Any] = {
        "multi_latent_attention": True,
        "q_lora_rank": config.q_lora_rank,
        "kv_lora_rank": config.kv_lora_rank,
        "qk_head_dim": config.qk_nope_head_dim,
        "qk_pos_emb_head_dim": config.qk_rope_head_dim,
        "v_head_dim": config.v_head_dim,
        "kv_channels": config.v_head_dim,
        "num_query_groups": config.num_attention_heads,
        "qk_layernorm": True,  # the norms of the latents
        "rotary_base": rope.get("rope_theta", 10000.0),
        "rope_type": "rope",
        "rotary_scaling_factor": 1.0,
        "mscale": 1.0,
        "mscale_all_dim": 0.0,
    }
    if rope.get("rope_type") == "yarn":
        original = rope["original_max_position_embeddings"]
        fields |= {
            "rope_type": "yarn",
            "rotary_scaling_factor": rope.get("factor") or config.max_position_embeddings / original,
            "original_max_position_embeddings": original,
            "beta_fast": rope.get("beta_fast") or 32,
            "beta_slow": rope.get("beta_slow") or 1,
            "mscale": rope.get("mscale") or 1.0,
            "mscale_all_dim": rope.get("mscale_all_dim") or 0.0,
        }
    return common.decoder_fields(config) | expert_fields(config) | fields


def _problems(config: Any) -> list[str]:
    problems = common.decoder_problems(config) + common.output_bias_problems(config) + expert_problems(config)
    rope = config.rope_parameters or {}
    if not config.rope_interleave:
        problems.append("rope_interleave false")
    if rope.get("rope_type") == "yarn":
        odd = [name for name in ("attention_factor",) if rope.get(name) is not None]
        odd += ["truncate false"] if rope.get("truncate") is False else []
        odd += ["mscale_all_dim without mscale"] if rope.get("mscale_all_dim") and not rope.get("mscale") else []
        problems += [f"rope_parameters: {what}" for what in odd]
    return problems


# Layers after the last are for multi-token prediction.
NEXT_TOKEN_LAYERS = ("model.layers.{beyond}.{anything}",)

DEEPSEEK_V3 = Family(
    name="DeepSeek-V3, GLM-4.7-Flash",
    model_types=("deepseek_v3", "glm4_moe_lite"),
    entries=(
        *common.OUTSIDE_LAYERS,
        *common.LAYER_NORMS,
        *common.LATENT_ATTENTION,
        *common.MLP,
        *EXPERTS,
    ),
    fields=_fields,
    problems=_problems,
    unused=(*common.COMPUTED, *NEXT_TOKEN_LAYERS),
)
