"""Which family a Hugging Face config belongs to."""

from __future__ import annotations

from typing import Any

from miles.backends.megatron_utils.families.deepseek_v3 import DEEPSEEK_V3
from miles.backends.megatron_utils.families.family import Family, UnsupportedModelError
from miles.backends.megatron_utils.families.glm4_moe import GLM4_MOE
from miles.backends.megatron_utils.families.llama import LLAMA
from miles.backends.megatron_utils.families.qwen2 import QWEN2
from miles.backends.megatron_utils.families.qwen3 import QWEN3
from miles.backends.megatron_utils.families.qwen3_moe import QWEN3_MOE

FAMILIES: tuple[Family, ...] = (LLAMA, QWEN2, QWEN3, QWEN3_MOE, DEEPSEEK_V3, GLM4_MOE)


def family_of(config: Any, name: str | None = None) -> Family:
    """The family of a transformers config.

    Args:
        name: `--model-name`, the model type or a family's usual spelling of it, in place of the config's.
    Raises: UnsupportedModelError for an unknown architecture, with those that are known, and for settings of a known one
        that cannot be built, all at once.
    """
    kind = name or getattr(config, "model_type", None)
    family = next((f for f in FAMILIES if _spelled(kind) in map(_spelled, f.model_types)), None)
    if family is None:
        known = "; ".join(f"{', '.join(f.model_types)} ({f.name})" for f in FAMILIES)
        where = "of --model-name" if name else "of config.json"
        raise UnsupportedModelError(
            f"the Megatron trainer does not know the architecture {kind!r} {where}. It knows: {known}. "
            "--train-backend fsdp takes any model that transformers loads"
        )
    problems = family.problems(config)
    if getattr(config, "quantization_config", None):
        problems.append("quantization_config (convert the checkpoint to bfloat16 first)")
    if problems:
        raise UnsupportedModelError(
            f"the Megatron trainer has {family.name} without: {'; '.join(problems)}. Use --train-backend fsdp for this model"
        )
    return family


def _spelled(name: Any) -> str:
    """`qwen3_moe` and `qwen3moe` are one name."""
    return str(name).lower().replace("_", "").replace("-", "")
