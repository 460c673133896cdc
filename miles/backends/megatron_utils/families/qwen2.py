"""Qwen2 and Qwen2.5: biases on query, key and value."""

from __future__ import annotations

from typing import Any

from miles.backends.megatron_utils.families import common
from miles.backends.megatron_utils.families.family import Family


def _fields(config: Any) -> dict[str, Any]:
    return common.decoder_fields(config) | {"add_qkv_bias": True}


QWEN2 = Family(
    name="Qwen2, Qwen2.5",
    model_types=("qwen2",),
    entries=(
        *common.OUTSIDE_LAYERS,
        *common.LAYER_NORMS,
        *common.ATTENTION,
        *common.ATTENTION_BIAS,
        *common.MLP,
    ),
    fields=_fields,
    problems=common.decoder_problems,
    unused=common.COMPUTED,
)
