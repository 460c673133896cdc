"""What the ranks of a test world do: build trainers, make batches, train."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist

from miles.backends.fsdp_utils.backend import FSDPBackend
from miles.backends.training_utils.batching.planner import plan_batches
from miles.backends.training_utils.batching.shards import split_train_data
from miles.backends.training_utils.checkpoint import CheckpointStore


def make_args(model_dir: str, **fields: Any) -> SimpleNamespace:
    args = {
        "hf_checkpoint": model_dir,
        "train_device": "cpu",
        "lr": 1e-2,
        "num_rollout": 10,
        "loss_type": "policy_loss",
        "advantage_estimator": "grpo",
        "eps_clip": 0.2,
        "kl_loss_type": "k3",
        "rollout_temperature": 1.0,
        "rollout_batch_size": 2,
        "n_samples_per_prompt": 4,
        "global_batch_size": 8,
        "micro_batch_size": 1,
        "use_dynamic_batch_size": True,
        "max_tokens_per_gpu": 64,
        "clip_grad": 1.0,
        "seed": 1,
    }
    return SimpleNamespace(**args | fields)


def make_batch(seed: int = 0, count: int = 8) -> dict[str, Any]:
    """Train data of `count` ragged samples, half of them good."""
    g = torch.Generator().manual_seed(seed)
    responses = torch.randint(3, 20, (count,), generator=g).tolist()
    prompts = torch.randint(1, 8, (count,), generator=g).tolist()
    totals = [p + r for p, r in zip(prompts, responses, strict=True)]
    return {
        "tokens": [torch.randint(3, 300, (n,), generator=g).tolist() for n in totals],
        "response_lengths": responses,
        "total_lengths": totals,
        "loss_masks": [[1] * n for n in responses],
        "rewards": [1.0, -1.0] * (count // 2),
        "raw_reward": [1.0, 0.0] * (count // 2),
        "truncated": [0] * count,
        "sample_indices": list(range(count)),
        "rollout_ids": list(range(count)),
        "rollout_mask_sums": responses,
        "rollout_log_probs": [(torch.randn(n, generator=g) * 0.1 - 5.8).tolist() for n in responses],
    }


class LayeredBackend(FSDPBackend):
    """Sharded layer by layer, as models too large for one group are, and gathered layer by layer too."""

    def _options(self, **kwargs: Any) -> Any:
        return dataclasses.replace(super()._options(**kwargs), single_group_bytes=0, gathered_bytes=0)


def make_backend(args: SimpleNamespace, *, by_layer: bool = False, with_ref: bool = False) -> tuple[FSDPBackend, int]:
    backend = (LayeredBackend if by_layer else FSDPBackend)(args, with_ref=with_ref)
    return backend, backend.load()


def shard_of(backend: FSDPBackend, data: dict[str, Any], rollout_id: int = 0) -> Any:
    plan = plan_batches(data, backend.parallel, backend.args)
    return split_train_data(data, plan, rollout_id)[backend.dp_rank]


def untimed(steps: list[dict[str, float]]) -> list[dict[str, float]]:
    return [{k: v for k, v in step.items() if not k.startswith("perf/")} for step in steps]


def weights_of(backend: FSDPBackend) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in backend.iter_weights()}


def train(args: SimpleNamespace, batches: list[dict[str, Any]], **kwargs: Any) -> dict[str, Any]:
    """Train on each batch in turn; metrics without times, and the weights at the end."""
    backend, start = make_backend(args, **kwargs)
    metrics = [untimed(backend.train(shard_of(backend, data, start + i))) for i, data in enumerate(batches)]
    return {"start": start, "metrics": metrics, "weights": weights_of(backend)}


def train_and_save(
    args: SimpleNamespace, batches: list[dict[str, Any]], root: str, rollout_id: int, **kwargs: Any
) -> None:
    backend, start = make_backend(args, **kwargs)
    for i, data in enumerate(batches):
        backend.train(shard_of(backend, data, start + i))
    save(backend, root, rollout_id)


def save(backend: FSDPBackend, root: str, rollout_id: int) -> None:
    store = CheckpointStore(root)
    folder: list[Path | None] = [store.begin(rollout_id) if backend.rank == 0 else None]
    dist.broadcast_object_list(folder, src=0)
    backend.save(folder[0])
    if backend.rank == 0:
        store.commit(rollout_id, {"weight_version": rollout_id + 1})
    dist.barrier()
