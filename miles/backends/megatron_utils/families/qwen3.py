"""Qwen3, dense: norms on the heads of query and key."""

from __future__ import annotations

from typing import Any

from miles.backends.megatron_utils.families import common
from miles.backends.megatron_utils.families.family import Family


def fields(config: Any) -> dict[str, Any]:
    return common.decoder_fields(config) | {"qk_layernorm": True}


def problems(config: Any) -> list[str]:
    return common.decoder_problems(config) + common.output_bias_problems(config)


ATTENTION = (*common.LAYER_NORMS, *common.ATTENTION, *common.HEAD_NORMS)

QWEN3 = Family(
    name="Qwen3",
    model_types=("qwen3",),
    entries=(*common.OUTSIDE_LAYERS, *ATTENTION, *common.MLP),
    fields=fields,
    problems=problems,
)
