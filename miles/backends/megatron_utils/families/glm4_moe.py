"""GLM-4.5 to 4.7: grouped queries with partial rotary positions, and DeepSeek-V3's experts."""

from __future__ import annotations

from typing import Any

from miles.backends.megatron_utils.families import common, deepseek_v3
from miles.backends.megatron_utils.families.family import Family


def _fields(config: Any) -> dict[str, Any]:
    own = {"qk_layernorm": config.use_qk_norm, "add_qkv_bias": config.attention_bias}
    return common.decoder_fields(config) | deepseek_v3.expert_fields(config) | own


def _problems(config: Any) -> list[str]:
    return common.decoder_problems(config) + deepseek_v3.expert_problems(config)


GLM4_MOE = Family(
    name="GLM-4.5, GLM-4.6, GLM-4.7",
    model_types=("glm4_moe",),
    entries=(
        *common.OUTSIDE_LAYERS,
        *common.LAYER_NORMS,
        *common.ATTENTION,
        *common.ATTENTION_BIAS,
        *common.HEAD_NORMS,
        *common.MLP,
        *deepseek_v3.EXPERTS,
    ),
    fields=_fields,
    problems=_problems,
    unused=(*common.COMPUTED, *deepseek_v3.NEXT_TOKEN_LAYERS),
)
