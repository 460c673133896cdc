"""Run in the ranks of a world: build a model in some layout, fill it, ask it, export it."""

from __future__ import annotations

import warnings
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist

from miles.utils.digest import tensor_digest

Layout = dict[str, int]


def built(directory: str, layout: Layout, **flags: Any) -> Any:
    """A filled model in `layout`: sizes of `tp`, `pp`, `vpp`, `ep`, `etp`."""
    warnings.simplefilter("ignore")
    from miles.backends.megatron_utils.platform import choose_platform

    platform = choose_platform("cpu")
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

    from miles.backends.megatron_utils.layout import make_groups
    from miles.backends.megatron_utils.model import build_model
    from miles.backends.megatron_utils.model_description import describe_model
    from miles.backends.megatron_utils.weights.checkpoint_files import HFDirectory
    from miles.backends.megatron_utils.weights.loading import load_weights
    from miles.backends.megatron_utils.weights.plan import plan_weights

    make_groups(
        tensor_model_parallel_size=layout.get("tp", 1),
        pipeline_model_parallel_size=layout.get("pp", 1),
        virtual_pipeline_model_parallel_size=layout.get("vpp"),
        expert_model_parallel_size=layout.get("ep", 1),
        expert_tensor_parallel_size=layout.get("etp", 1),
        create_gloo_process_groups=False,
    )
    model_parallel_cuda_manual_seed(1)
    args = SimpleNamespace(**flags)
    description = describe_model(args, directory, platform, torch.float32)
    chunks = build_model(args, description, platform)
    files = HFDirectory(directory)
    plan = plan_weights(chunks, description, files)
    load_weights(plan, files)
    return SimpleNamespace(chunks=chunks, description=description, plan=plan)


@torch.no_grad()
def logits(directory: str, layout: Layout, tokens: torch.Tensor) -> torch.Tensor:
    """Of a layout without pipeline stages, `[batch, sequence, vocabulary]`."""
    from megatron.core import parallel_state

    model = built(directory, layout)
    positions = torch.arange(tokens.shape[1]).expand_as(tokens)
    shard = model.chunks[0].eval()(tokens, positions, None)
    group = parallel_state.get_tensor_model_parallel_group()
    shards = [torch.empty_like(shard) for _ in range(group.size())]
    dist.all_gather(shards, shard.contiguous(), group=group)
    return torch.cat(shards, -1)[..., : model.description.vocab_size]


def exported(directory: str, layout: Layout, dtype: torch.dtype | None = None, **flags: Any) -> dict[str, str] | None:
    """Digests of what this rank exports; None on ranks that are no source."""
    from miles.backends.megatron_utils.weights.exporting import WeightExporter

    plan = built(directory, layout, **flags).plan
    exporter = WeightExporter(plan)
    stream = list(exporter.iter_tensors(lambda name: dtype or plan.dtypes[name]))
    again = [name for name, count in Counter(name for name, _ in stream).items() if count > 1]
    assert not again, again
    if not exporter.is_source:
        assert all(tensor.numel() == 0 for _, tensor in stream)
        return None
    return {name: tensor_digest(tensor) for name, tensor in stream}


def exported_after(directory: str, layout: Layout, other: str) -> dict[str, str] | None:
    """The same of a model that was filled a second time, from the directory `other`."""
    from miles.backends.megatron_utils.weights.checkpoint_files import HFDirectory
    from miles.backends.megatron_utils.weights.exporting import WeightExporter
    from miles.backends.megatron_utils.weights.loading import load_weights

    plan = built(directory, layout).plan
    load_weights(plan, HFDirectory(other))
    exporter = WeightExporter(plan)
    stream = list(exporter.iter_tensors(plan.dtypes.__getitem__))
    return {name: tensor_digest(tensor) for name, tensor in stream} if exporter.is_source else None


def checkpoint_names(directory: str) -> set[str]:
    """Of a layer's norms in megatron-core's own checkpoints, without the numbers of layers."""
    chunk = built(directory, {}).chunks[0]
    return {
        key.split("layers.")[-1].lstrip("0123456789.")
        for key in map(_key, _leaves(chunk.sharded_state_dict()))
        if "norm" in key
    }


def _leaves(tree: Any) -> list[Any]:
    return [leaf for value in tree.values() for leaf in _leaves(value)] if isinstance(tree, dict) else [tree]


def _key(leaf: Any) -> str:
    return getattr(leaf, "key", "")


def units(directory: str) -> list[list[str]]:
    """Names of the tensors that travel together."""
    from miles.backends.megatron_utils.weights.exporting import WeightExporter

    plan = built(directory, {}).plan
    items = WeightExporter(plan).iter_units(plan.dtypes.__getitem__)
    return [[name for name, _ in item] for item in items if isinstance(item, list)]


def share_read(directory: str, layout: Layout) -> float:
    """Elements that loading read, over those of the directory."""
    from miles.backends.megatron_utils.weights.checkpoint_files import HFDirectory, StoredTensor

    read, count = StoredTensor.read, 0

    def counting(self: Any, *span: Any) -> torch.Tensor:
        nonlocal count
        tensor = read(self, *span)
        count += tensor.numel()
        return tensor

    StoredTensor.read = counting  # type: ignore[method-assign]
    try:
        built(directory, layout)
    finally:
        StoredTensor.read = read  # type: ignore[method-assign]
    return count / sum(torch.Size(s.shape).numel() for s in HFDirectory(directory).tensors.values())


def written(directory: str, layout: Layout, target: str, shard_bytes: int | None = None) -> None:
    from miles.backends.megatron_utils.weights.exporting import WeightExporter
    from miles.backends.training_utils import hf_directory

    exporter = WeightExporter(built(directory, layout).plan)
    usual = hf_directory.SHARD_BYTES
    hf_directory.SHARD_BYTES = shard_bytes or usual
    try:
        exporter.write_directory(Path(target))
    finally:
        hf_directory.SHARD_BYTES = usual


def logits_with_gate_and_up_exchanged(directory: str, tokens: torch.Tensor) -> torch.Tensor:
    """Of a table with a mistake that keeps all names and shapes."""
    import dataclasses

    from miles.backends.megatron_utils.families import registry

    right = registry.FAMILIES
    registry.FAMILIES = tuple(
        dataclasses.replace(
            family,
            entries=tuple(
                dataclasses.replace(e, hf=e.hf[::-1] if e.kind == "gate_up" else e.hf) for e in family.entries
            ),
        )
        for family in right
    )
    try:
        return logits(directory, {}, tokens)
    finally:
        registry.FAMILIES = right


def without_rows(directory: str, *endings: str) -> None:
    """Build with a table that lacks the rows of these Megatron tensors."""
    import dataclasses

    from miles.backends.megatron_utils.families import registry

    right = registry.FAMILIES
    registry.FAMILIES = tuple(
        dataclasses.replace(f, entries=tuple(e for e in f.entries if not e.megatron.endswith(endings))) for f in right
    )
    try:
        built(directory, {"pp": 2})
    finally:
        registry.FAMILIES = right
