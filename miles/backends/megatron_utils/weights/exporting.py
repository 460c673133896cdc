"""Whole tensors under their Hugging Face names, of the shards that ranks hold: the way of `loading.py` back.

Each pipeline stage has one source rank, where its tensors become whole, one at a time. The ranks that share them take part
in the gathers; other replicas do nothing. Experts come after everything else.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch import Tensor

from miles.backends.megatron_utils.families.common import TIED_HEAD
from miles.backends.megatron_utils.weights.checkpoint_files import HFDirectory
from miles.backends.megatron_utils.weights.plan import PlannedTensor, WeightPlan
from miles.backends.training_utils.agreement import gather_objects
from miles.backends.training_utils.hf_directory import write_hf_directory

NamedTensor = tuple[str, Tensor]
# Layers of engines that fuse these load them in one call, or not at all.
ATOMIC = (("q_a_proj.weight", "kv_a_proj_with_mqa.weight"),)


class WeightExporter:
    """Exports the tensors of a plan. Built by all ranks together, and used by all of them."""

    def __init__(self, plan: WeightPlan) -> None:
        self.plan = plan
        self.is_source = (
            parallel_state.get_data_parallel_rank(with_context_parallel=True) == 0
            and parallel_state.get_tensor_model_parallel_rank() == 0
        )
        sources = {rank for rank, is_source in enumerate(gather_objects(self.is_source)) if is_source}
        self._shared = _Sharing(parallel_state.get_tensor_model_parallel_group(), sources)
        self._experts = _Sharing(parallel_state.get_expert_tensor_and_model_parallel_group(), sources)

    @torch.no_grad()
    def iter_units(self, dtype_of: Callable[[str], torch.dtype]) -> Iterator[NamedTensor | list[NamedTensor]]:
        """(name, whole tensor), or a list of those that must reach an engine together. Collective.

        Whole tensors are on source ranks, which may share memory with the model; other ranks get empty ones.

        Args:
            dtype_of: Hugging Face name -> the dtype to export it in.
        """
        groups = self._atomic_groups()
        held: dict[tuple[str, ...], list[NamedTensor]] = {}
        for name, tensor in self.iter_tensors(dtype_of):
            group = groups.get(name)
            if group is None:
                yield name, tensor
                continue
            unit = held.setdefault(group, [])
            unit.append((name, tensor))
            if len(unit) == len(group):
                yield held.pop(group)

    @torch.no_grad()
    def iter_tensors(self, dtype_of: Callable[[str], torch.dtype]) -> Iterator[NamedTensor]:
        """The same one by one."""
        wanted = [item for item in self.plan.tensors if item.mapping.entry != TIED_HEAD]
        for item in wanted:
            if not item.is_expert:
                shards = self._shared.collect(self._cast(item, dtype_of), whole=item.shard.size == 1)
                yield from self._join(item, item.mapping.hf_names(), shards)
        for item in wanted:
            if item.is_expert:
                yield from self._join_experts(item, dtype_of)

    def _cast(self, item: PlannedTensor, dtype_of: Callable[[str], torch.dtype]) -> Tensor:
        return item.local.tensor.detach().to(dtype_of(item.mapping.hf_names()[0]))

    def _join(self, item: PlannedTensor, names: tuple[str, ...], shards: list[Tensor] | None) -> Iterator[NamedTensor]:
        if shards is None:
            yield from ((name, torch.empty(0)) for name in names)
        else:
            yield from zip(names, item.transform.join(shards), strict=True)

    def _join_experts(self, item: PlannedTensor, dtype_of: Callable[[str], torch.dtype]) -> Iterator[NamedTensor]:
        """The expert at the same place on every expert-parallel rank: one gather gives as many experts as those are."""
        shards = self._experts.collect(self._cast(item, dtype_of), whole=False)
        assert item.local.local_expert is not None and item.mapping.expert is not None
        per_rank = self.plan.experts_per_rank
        for expert_rank in range(self.plan.expert_ranks):
            expert = expert_rank * per_rank + item.local.local_expert
            own = None
            if shards is not None:
                parts = sorted((place[1], i) for i, place in enumerate(self._experts.places) if place[0] == expert_rank)
                own = [shards[i] for _, i in parts]
            yield from self._join(item, item.mapping.hf_names(expert), own)

    def _atomic_groups(self) -> dict[str, tuple[str, ...]]:
        """Of each tensor that belongs to one: the names of its group."""
        names = [name for item in self.plan.tensors for name in item.mapping.hf_names()]
        groups: dict[str, tuple[str, ...]] = {}
        for endings in ATOMIC:
            prefixes = {name.removesuffix(endings[0]) for name in names if name.endswith(endings[0])}
            for prefix in prefixes:
                group = tuple(prefix + ending for ending in endings)
                if set(group) <= set(names):
                    groups |= dict.fromkeys(group, group)
        return groups

    def write_directory(self, directory: Path) -> None:
        """Write a Hugging Face directory like the plan's: its dtypes, its config, its tokenizer. Collective.

        Raises: RuntimeError on every rank; nothing is then left there.
        """
        config = self.plan.source / "config.json"
        write_hf_directory(
            self._with_carried(),
            self.plan.source,
            directory,
            lambda target: (target / "config.json").write_bytes(config.read_bytes()),
            writes=self.is_source,
        )

    def _with_carried(self) -> Iterator[NamedTensor]:
        """The model's tensors, and those of the source directory that the model does without, unchanged."""
        yield from self.iter_tensors(self.plan.dtypes.__getitem__)
        if self.is_source and parallel_state.is_pipeline_last_stage():
            source = HFDirectory(self.plan.source)
            yield from ((name, source.tensors[name].read()) for name in self.plan.carried)


class _Sharing:
    """Ranks that share tensors, and the source among them, if it is one of them."""

    def __init__(self, group: Any, sources: set[int]) -> None:
        self.group = group
        ranks = dist.get_process_group_ranks(group)
        self._target = next((i for i, rank in enumerate(ranks) if rank in sources), None)
        self._is_source = dist.get_rank() in sources
        # (expert-parallel rank, expert-tensor-parallel rank) of each member
        place = (
            parallel_state.get_expert_model_parallel_rank(),
            parallel_state.get_expert_tensor_parallel_rank(),
        )
        self.places = gather_objects(place, group)

    def collect(self, tensor: Tensor, *, whole: bool) -> list[Tensor] | None:
        """Every rank's tensor on the source, None elsewhere; nothing is sent for a tensor that each has `whole`."""
        if whole or self.group.size() == 1:
            return [tensor] if self._is_source else None
        if self._target is None:
            return None
        tensor = tensor.contiguous()
        parts = [torch.empty_like(tensor) for _ in self.places] if self._is_source else None
        dist.gather(tensor, parts, group=self.group, group_dst=self._target)
        return parts
