"""One name for each tensor of the model, whichever rank, virtual stage and layer implementation holds it.

Transformer Engine fuses a norm with the matrix after it and numbers the experts' weights; the local layers keep them
apart. Canonical names are those of the local layers, with layers and experts counted over the whole model.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core import parallel_state

# Ends of Transformer Engine's names -> the local layers'.
ALIASES = {
    "self_attention.linear_qkv.layer_norm_weight": "input_layernorm.weight",
    "self_attention.linear_q_proj.layer_norm_weight": "input_layernorm.weight",
    "self_attention.linear_q_up_proj.layer_norm_weight": "self_attention.q_layernorm.weight",
    "self_attention.linear_kv_up_proj.layer_norm_weight": "self_attention.kv_layernorm.weight",
    "mlp.linear_fc1.layer_norm_weight": "pre_mlp_layernorm.weight",
}
# Buffers that are weights: everything else that is no parameter is computed.
_WEIGHT_BUFFERS = (".router.expert_bias",)
_LAYER = re.compile(r"^decoder\.layers\.(\d+)\.(.*)$")
_LOCAL_EXPERT = re.compile(r"^mlp\.experts\.local_experts\.(\d+)\.(.*)$")
_GROUPED_EXPERT = re.compile(r"^mlp\.experts\.(linear_fc[12]\.(?:weight|bias))(\d+)$")


@dataclass(frozen=True)
class LocalTensor:
    """A tensor of this rank. `local_expert`: its expert's place among this rank's, None for what is no expert."""

    chunk: int
    name: str
    canonical: str
    tensor: torch.Tensor
    local_expert: int | None = None


def expert_offset(num_experts: int | None) -> int:
    """Index of this rank's first expert."""
    ranks = parallel_state.get_expert_model_parallel_world_size()
    return parallel_state.get_expert_model_parallel_rank() * ((num_experts or 0) // ranks)


def local_tensors(chunks: list[Any]) -> Iterator[LocalTensor]:
    """Every weight of this rank's model chunks, in an order that is equal on all ranks of a pipeline stage.

    Args:
        chunks: unwrapped models, one a virtual stage.
    """
    for index, chunk in enumerate(chunks):
        offset = expert_offset(chunk.config.num_moe_experts)
        numbers = [layer.layer_number - 1 for layer in chunk.decoder.layers]
        weights = dict(chunk.named_parameters())
        weights |= {n: b for n, b in chunk.named_buffers() if n.endswith(_WEIGHT_BUFFERS) and b is not None}
        for name, tensor in weights.items():
            canonical, local = canonical_name(name, numbers, offset)
            yield LocalTensor(index, name, canonical, tensor, local)


def canonical_name(name: str, layer_numbers: list[int], expert_offset: int) -> tuple[str, int | None]:
    """The canonical name of a parameter, and its expert's place on this rank.

    Args:
        layer_numbers: of each layer of the chunk, its number in the whole model, from 0.
    """
    layer = _LAYER.match(name)
    if layer is None:
        return name, None
    prefix, rest = f"decoder.layers.{layer_numbers[int(layer[1])]}.", layer[2]
    expert = None
    if match := _LOCAL_EXPERT.match(rest):
        expert, end = int(match[1]), match[2]
    elif match := _GROUPED_EXPERT.match(rest):
        expert, end = int(match[2]), match[1]
    if expert is not None:
        return f"{prefix}mlp.experts.{expert_offset + expert}.{end}", expert
    return prefix + ALIASES.get(rest, rest), None
