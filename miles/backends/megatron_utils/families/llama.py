"""Llama 2 and 3."""

from __future__ import annotations

from typing import Any

from miles.backends.megatron_utils.families import common
from miles.backends.megatron_utils.families.family import Family


def _problems(config: Any) -> list[str]:
    return common.decoder_problems(config) + common.output_bias_problems(config)


LLAMA = Family(
    name="Llama",
    model_types=("llama",),
    entries=(*common.OUTSIDE_LAYERS, *common.LAYER_NORMS, *common.ATTENTION, *common.MLP),
    fields=common.decoder_fields,
    problems=_problems,
    unused=common.COMPUTED,
)
