"""What the ranks of a test world do with the Megatron trainer."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist

from miles.backends.training_utils.batching.planner import plan_batches
from miles.backends.training_utils.batching.shards import split_train_data
from miles.backends.training_utils.checkpoint import CheckpointStore

TP, PP, CP, EP = (f"{axis}_parallel_size" for axis in ("tensor_model", "pipeline_model", "context", "expert_model"))


def make_backend(args: SimpleNamespace, **kwargs: Any) -> tuple[Any, int]:
    from miles.backends.megatron_utils.backend import MegatronBackend

    backend = MegatronBackend(args, **kwargs)
    return backend, backend.load()


def shard_of(backend: Any, data: dict[str, Any], rollout_id: int = 0) -> Any:
    plan = plan_batches(data, backend.parallel, backend.args)
    return split_train_data(data, plan, rollout_id)[backend.dp_rank]


def untimed(steps: list[dict[str, float]]) -> list[dict[str, float]]:
    return [{k: v for k, v in step.items() if not k.startswith("perf/")} for step in steps]


def collected(items: Any) -> dict[str, torch.Tensor]:
    """What the source ranks of all stages yield, on every rank."""
    own: dict[str, torch.Tensor] = {}
    for item in items:
        own |= {name: tensor.clone() for name, tensor in ([item] if isinstance(item, tuple) else item)}
    everywhere: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everywhere, {n: t for n, t in own.items() if t.numel()})
    return {name: tensor for one in everywhere for name, tensor in one.items()}


def weights_of(backend: Any) -> dict[str, torch.Tensor]:
    return collected(backend.iter_weights())


def gradients(args: SimpleNamespace, batch: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Of one optimizer step over `batch`, whole, by Hugging Face name."""
    from miles.backends.megatron_utils.weights.exporting import WeightExporter

    backend, _ = make_backend(args)
    shard = shard_of(backend, batch)
    backend.runner.accumulate_gradients(shard, shard.steps[0], old_is_current=False)
    trained = [item for item in backend.plan.tensors if hasattr(item.local.tensor, "main_grad")]
    local = [dataclasses.replace(item.local, tensor=item.local.tensor.main_grad) for item in trained]
    of_gradients = [dataclasses.replace(item, local=part) for item, part in zip(trained, local, strict=True)]
    exporter = WeightExporter(dataclasses.replace(backend.plan, tensors=of_gradients))
    found = collected(exporter.iter_units(lambda name: torch.float32))
    return {name: tensor.double() for name, tensor in found.items()}


def train(args: SimpleNamespace, batches: list[dict[str, Any]], **kwargs: Any) -> dict[str, Any]:
    """Train on each batch in turn; metrics without times, and the weights at the end."""
    backend, start = make_backend(args, **kwargs)
    metrics = [untimed(backend.train(shard_of(backend, data, start + i))) for i, data in enumerate(batches)]
    return {"start": start, "metrics": metrics, "weights": weights_of(backend)}


def save(backend: Any, root: str, rollout_id: int) -> None:
    store, rank = CheckpointStore(root), dist.get_rank()
    folder: list[Path | None] = [store.begin(rollout_id) if rank == 0 else None]
    dist.broadcast_object_list(folder, src=0)
    backend.save(folder[0])
    if rank == 0:
        store.commit(rollout_id, {"weight_version": rollout_id + 1})
    dist.barrier()


def log_probs(backend: Any, batch: dict[str, Any]) -> list[torch.Tensor]:
    """Of every sample of the batch, in its order, on every rank."""
    shard = shard_of(backend, batch)
    scored = backend.score(shard, "actor")
    own = dict(zip(shard.columns["sample_indices"], scored, strict=True))
    everywhere: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everywhere, own)
    merged = {index: values for one in everywhere for index, values in one.items()}
    return [merged[i] for i in sorted(merged)]


def train_and_save(args: SimpleNamespace, batches: list[dict[str, Any]], root: str, **kwargs: Any) -> dict[str, Any]:
    """Train on all but the last batch, save, score the last, train on it."""
    backend, start = make_backend(args, **kwargs)
    for i, data in enumerate(batches[:-1]):
        backend.train(shard_of(backend, data, start + i))
    save(backend, root, start + len(batches) - 2)
    return _go_on(backend, batches[-1], start + len(batches) - 1)


def load_and_train(args: SimpleNamespace, batch: dict[str, Any], **kwargs: Any) -> dict[str, Any]:
    """Resume, score the batch, train on it."""
    backend, start = make_backend(args, **kwargs)
    return _go_on(backend, batch, start)


def _go_on(backend: Any, batch: dict[str, Any], rollout_id: int) -> dict[str, Any]:
    scores = log_probs(backend, batch)
    metrics = untimed(backend.train(shard_of(backend, batch, rollout_id)))
    return {"start": rollout_id, "log_probs": scores, "metrics": metrics, "weights": weights_of(backend)}
