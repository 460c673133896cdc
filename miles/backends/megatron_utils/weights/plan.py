"""Which tensors of a Hugging Face directory each of this rank's tensors is made of, checked once over all ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.utils import unwrap_model

from miles.backends.megatron_utils.model_description import ModelDescription
from miles.backends.megatron_utils.weights.canonical import LocalTensor, local_tensors
from miles.backends.megatron_utils.weights.checkpoint_files import HFDirectory
from miles.backends.megatron_utils.weights.name_map import Mapping, NameMap, check_complete
from miles.backends.megatron_utils.weights.transforms import (
    GateUp,
    LayoutError,
    QueryKeyValue,
    Shape,
    Shard,
    Split,
    Transform,
    Vocabulary,
    Whole,
)
from miles.backends.training_utils.agreement import gather_objects


@dataclass(frozen=True)
class PlannedTensor:
    """A tensor of this rank, where it comes from, and its part of that: `shard` is (0, 1) for what is not shared."""

    local: LocalTensor
    mapping: Mapping
    transform: Transform
    shard: Shard

    @property
    def is_expert(self) -> bool:
        return self.local.local_expert is not None


@dataclass
class WeightPlan:
    """The rank's tensors, in an order that is equal on all ranks of a pipeline stage.

    `dtypes` and `shapes` are of the tensors of the directory `source`, by name; `carried` are those that the model does
    without.
    """

    tensors: list[PlannedTensor]
    dtypes: dict[str, torch.dtype]
    shapes: dict[str, Shape]
    source: Path
    carried: tuple[str, ...]
    expert_ranks: int
    experts_per_rank: int


def transforms_of(description: ModelDescription) -> dict[str, Transform]:
    """The kinds that name maps use, for this model's sizes."""
    config = description.config
    return {
        "whole": Whole(),
        "rows": Split(0),
        "columns": Split(1),
        "gate_up": GateUp(),
        "vocabulary": Vocabulary(description.vocab_size, description.padded_vocab_size),
        "query_key_value": QueryKeyValue(config.num_query_groups, config.num_attention_heads, config.kv_channels),
    }


def plan_weights(chunks: Sequence[Any], description: ModelDescription, directory: HFDirectory) -> WeightPlan:
    """Match this rank's model with `directory`. Collective over all ranks.

    Raises: NameMapError on every rank, listing all tensors that only one side has or whose shapes differ.
    """
    config = description.config
    name_map = NameMap(description.family, config.num_layers, tied=description.tied)
    kinds = transforms_of(description)
    planned, wrong, names = [], [], []
    for local in local_tensors(unwrap_model(list(chunks))):
        names.append(local.canonical)
        mapping = name_map.of(local.canonical)
        if mapping is None:
            continue
        sources = [directory.tensors.get(name) for name in mapping.hf_names()]
        shapes = [source.shape for source in sources if source is not None]
        if len(shapes) < len(sources):
            continue
        transform = kinds[mapping.entry.kind]
        try:
            shard = _shard(local, transform, shapes)
        except LayoutError as error:
            wrong.append(f"{', '.join(mapping.hf_names())}: {error}")
            continue
        planned.append(PlannedTensor(local, mapping, transform, shard))
    everywhere = gather_objects((names, wrong))
    check_complete(
        name_map,
        [name for names, _ in everywhere for name in names],
        directory.tensors,
        list(dict.fromkeys(text for _, texts in everywhere for text in texts)),
        directory.path,
    )
    dtypes = {name: stored.dtype for name, stored in directory.tensors.items()}
    ranks = parallel_state.get_expert_model_parallel_world_size()
    carried = tuple(name for name in directory.tensors if name_map.is_carried(name))
    stored_shapes = {name: stored.shape for name, stored in directory.tensors.items() if not name_map.is_unused(name)}
    return WeightPlan(
        planned, dtypes, stored_shapes, directory.path, carried, ranks, (config.num_moe_experts or 0) // ranks
    )


def _shard(local: LocalTensor, transform: Transform, shapes: Sequence[Shape]) -> Shard:
    """Raises: LayoutError where the tensor has another shape than its part of the checkpoint's."""
    if local.local_expert is None:
        rank, size = (
            parallel_state.get_tensor_model_parallel_rank(),
            parallel_state.get_tensor_model_parallel_world_size(),
        )
    else:
        rank, size = (
            parallel_state.get_expert_tensor_parallel_rank(),
            parallel_state.get_expert_tensor_parallel_world_size(),
        )
    own, whole = tuple(local.tensor.shape), Shard(0, 1)
    # Transformer Engine keeps MLA's down projections whole on every rank; the local layers share them.
    if transform.shape(shapes, whole) == own:
        return whole
    shard = Shard(rank, size)
    if (wanted := transform.shape(shapes, shard)) != own:
        raise LayoutError(f"{list(wanted)} on each rank, the model has {list(own)}")
    return shard
