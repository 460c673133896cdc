"""Qwen3-MoE: Qwen3 whose layers, all or some, have experts with softmax routing."""

from __future__ import annotations

from typing import Any

from miles.backends.megatron_utils.families import common, qwen3
from miles.backends.megatron_utils.families.family import Family


def _fields(config: Any) -> dict[str, Any]:
    dense = set(config.mlp_only_layers or [])
    layers = range(config.num_hidden_layers)
    return qwen3.fields(config) | {
        "num_moe_experts": config.num_experts,
        "moe_ffn_hidden_size": config.moe_intermediate_size,
        "moe_router_topk": config.num_experts_per_tok,
        # Scores of the chosen experts that sum to 1 are a softmax over those alone.
        "moe_router_pre_softmax": not config.norm_topk_prob,
        "moe_layer_freq": [int(i not in dense and (i + 1) % config.decoder_sparse_step == 0) for i in layers],
    }


QWEN3_MOE = Family(
    name="Qwen3-MoE",
    model_types=("qwen3_moe",),
    entries=(*common.OUTSIDE_LAYERS, *qwen3.ATTENTION, *common.MLP, *common.EXPERTS),
    fields=_fields,
    problems=qwen3.problems,
)
