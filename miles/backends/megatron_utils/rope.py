"""Rotary positions as the Hugging Face config has them.

megatron-core computes plain frequencies, llama3's scaling with built-in constants, and YaRN. Here the frequencies come from
transformers' own functions, so that every scaling is the one of the config.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from miles.backends.megatron_utils.families.family import UnsupportedModelError

if TYPE_CHECKING:  # startup rules read the config without it
    import torch

SCALINGS = ("default", "linear", "llama3", "yarn")


@dataclass(frozen=True)
class Rope:
    """`frequencies`: one for each pair of rotated dimensions, fp32; None for megatron-core's plain ones.

    `attention_factor` scales sine and cosine, and so attention scores by its square.
    """

    base: float
    share: float
    frequencies: torch.Tensor | None
    attention_factor: float


def read_rope(config: Any) -> Rope:
    """Raises: UnsupportedModelError for a scaling that depends on the length of the input, or cannot be applied."""
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    fields = config.rope_parameters or {}
    kind = fields.get("rope_type", "default")
    if kind not in SCALINGS:
        raise UnsupportedModelError(
            f"the Megatron trainer has no rotary scaling {kind!r} of config.json: it has {', '.join(SCALINGS)}"
        )
    base, share = float(fields.get("rope_theta", 10000.0)), float(fields.get("partial_rotary_factor", 1.0))
    if kind == "default":
        return Rope(base, share, None, 1.0)
    frequencies, factor = ROPE_INIT_FUNCTIONS[kind](config)
    if share < 1.0 and factor != 1.0:
        raise UnsupportedModelError(
            f"the Megatron trainer has no rotary scaling {kind!r} with partial_rotary_factor {share}: its attention factor "
            "would reach dimensions that are not rotated"
        )
    return Rope(base, share, frequencies, factor)


def apply_frequencies(chunk: Any, rope: Rope) -> None:
    """Give a built model the config's frequencies. YaRN of latent attention has its own, from `TransformerConfig`."""
    from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding

    if rope.frequencies is None:
        return
    for module in chunk.modules():
        if type(module) is RotaryEmbedding:
            if module.inv_freq.shape != rope.frequencies.shape:
                raise ValueError(
                    f"megatron-core rotates {2 * module.inv_freq.numel()} dimensions, config.json says "
                    f"{2 * rope.frequencies.numel()}"
                )
            module.inv_freq = rope.frequencies.to(module.inv_freq)
