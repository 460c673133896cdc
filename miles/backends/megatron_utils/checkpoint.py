"""Checkpoints through megatron-core's dist_checkpointing, in its torch_dist format: saved in one layout, loaded in another.

iter_0000007/
    .metadata, common.pt, metadata.json, __{rank}_{part}.distcp      model and optimizer, under megatron-core's names
    ref/...                     the same of a reference that moves (--ref-update-interval)
    lr_schedule.json, model.json, rng_rank{rank}.pt
"""

from __future__ import annotations

import contextlib
import json
import queue
import types
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing, parallel_state, tensor_parallel
from megatron.core.dist_checkpointing.serialization import (
    get_default_load_sharded_strategy,
    get_default_save_sharded_strategy,
)
from megatron.core.dist_checkpointing.strategies import filesystem_async
from megatron.core.dist_checkpointing.strategies.fully_parallel import (
    FullyParallelLoadStrategyWrapper,
    FullyParallelSaveStrategyWrapper,
)
from megatron.core.utils import unwrap_model

from miles.backends.megatron_utils import optimizer as optimizers
from miles.backends.megatron_utils.weight_tags import WeightCopies, take_shards
from miles.backends.training_utils.agreement import check_room, gather_objects, on_every_rank
from miles.backends.training_utils.checkpoint import CheckpointError
from miles.backends.training_utils.lr_schedule import LRSchedule
from miles.backends.training_utils.model_identity import MODEL, check_same_model, recorded
from miles.backends.training_utils.rng import load_rng, save_rng

_SCHEDULE = "lr_schedule.json"
_REFERENCE = "ref"
# Optimizer state as tensors of the parameters' shapes, which any layout can cut anew.
_RESHARDABLE = {"distrib_optim_sharding_type": "fully_reshardable"}
_TRAINER = "megatron"


@dataclass
class TrainState:
    """What is saved. `identity`: of the model, as `model_identity` records it."""

    chunks: Sequence[Any]
    optimizer: Any
    schedule: LRSchedule
    copies: WeightCopies
    identity: dict[str, Any]


def save_state(state: TrainState, directory: Path, args: Any) -> None:
    """Write this rank's part below `directory`, which is empty. Collective.

    Raises: CheckpointError on every rank when any rank could not write.
    """
    kept = not getattr(args, "no_save_optim", False)
    check_room(_local_bytes(state, with_optimizer=kept), directory)
    on_every_rank(lambda: write_weights(state.chunks, directory, state.optimizer if kept else None), directory)
    if state.copies.moving_reference is not None:
        folder = directory / _REFERENCE
        if dist.get_rank() == 0:
            folder.mkdir()
        dist.barrier()
        with state.copies.weights("ref"):
            on_every_rank(lambda: write_weights(state.chunks, folder), folder)

    kind = _optimizer_kind(state.optimizer) if kept else "left out"

    def small_files() -> None:
        save_rng(directory, tracker=tensor_parallel.get_cuda_rng_tracker().get_states())
        if dist.get_rank() == 0:
            (directory / _SCHEDULE).write_text(json.dumps(state.schedule.state_dict(), indent=2))
            model = state.identity | {
                "trainer": _TRAINER,
                "optimizer": kind,
                "hf_checkpoint": str(args.hf_checkpoint),
            }
            (directory / MODEL).write_text(json.dumps(model, indent=2))

    on_every_rank(small_files, directory)


def load_state(state: TrainState, directory: Path, args: Any) -> None:
    """Restore what `save_state` wrote, in this run's layout, as far as the flags ask for it. Collective.

    Raises: CheckpointError when it is another model's or another trainer's, or lacks something that is asked for.
    """
    saved = recorded(directory)
    if saved.get("trainer") != _TRAINER:
        raise CheckpointError(
            f"{directory} was written by the FSDP trainer: resume with --train-backend fsdp, or export it with --save-hf "
            "and start from that as --hf-checkpoint"
        )
    check_same_model(saved, state.identity, directory, args.hf_checkpoint)
    finetune = bool(getattr(args, "finetune", False))
    if not finetune and not (directory / _SCHEDULE).is_file():
        raise CheckpointError(
            f"{directory} has weights alone, as a conversion writes them: --finetune starts from them"
        )
    with_optimizer = not (finetune or getattr(args, "no_load_optim", False))
    if with_optimizer:
        _check_optimizer(saved["optimizer"], _optimizer_kind(state.optimizer), directory)
    read_weights(state.chunks, directory, state.optimizer if with_optimizer else None)
    if not with_optimizer:
        state.optimizer.reload_model_params()
    if state.copies.moving_reference is not None and (directory / _REFERENCE).is_dir():
        own = take_shards(state.chunks)
        read_weights(state.chunks, directory / _REFERENCE)
        state.copies.fixed["ref"] = take_shards(state.chunks)
        state.copies.put_back(own)
    if finetune:
        return
    schedule = json.loads((directory / _SCHEDULE).read_text())
    override = bool(getattr(args, "override_lr_scheduler", False))
    use = bool(getattr(args, "use_checkpoint_lr_scheduler", True)) and not override
    state.schedule.load_state_dict(schedule, use_checkpoint=use, override=override)
    if not getattr(args, "no_load_rng", False):
        generators = load_rng(directory, args)
        if generators is not None:
            tensor_parallel.get_cuda_rng_tracker().set_states(generators["tracker"])


# ---- the sharded state -----------------------------------------------------------------------------------------------


def write_weights(chunks: Sequence[Any], directory: Path, optimizer: Any = None) -> None:
    """Write the model, and the optimizer if it is given, below `directory`. Collective."""
    # Results of the writers come back to this process: the queue of a manager process, which megatron-core would start for
    # a writer in the background, and which imports the program anew, is not needed.
    filesystem_async._results_queue = queue.Queue()
    strategy = FullyParallelSaveStrategyWrapper(get_default_save_sharded_strategy("torch_dist"), _replicas())
    dist_checkpointing.save(_sharded(chunks, optimizer), str(directory), strategy)


@torch.no_grad()
def read_weights(chunks: Sequence[Any], directory: Path, optimizer: Any = None) -> None:
    """Fill the model, and the optimizer if it is given, from what any layout wrote. Collective."""
    strategy = FullyParallelLoadStrategyWrapper(get_default_load_sharded_strategy(str(directory)), _replicas())
    loaded = dist_checkpointing.load(_sharded(chunks, optimizer, loading=True), str(directory), strategy)
    for key, chunk in _named_chunks(chunks):
        unwrap_model(chunk).load_state_dict(loaded[key])
    if optimizer is not None:
        with _steps_of_torch_adam(optimizer):
            optimizer.load_state_dict(loaded["optimizer"])


def _sharded(chunks: Sequence[Any], optimizer: Any, *, loading: bool = False) -> dict[str, Any]:
    sharded: dict[str, Any] = {key: unwrap_model(chunk).sharded_state_dict() for key, chunk in _named_chunks(chunks)}
    if optimizer is not None:
        options = {"metadata": _RESHARDABLE} if _is_distributed(optimizer) else {}
        sharded["optimizer"] = optimizer.sharded_state_dict(sharded, is_loading=loading, **options)
    return sharded


def _named_chunks(chunks: Sequence[Any]) -> list[tuple[str, Any]]:
    """megatron-core's own names for them."""
    return [("model" if len(chunks) == 1 else f"model{i}", chunk) for i, chunk in enumerate(chunks)]


def _replicas() -> Any:
    """The ranks that hold copies, and so share the work of writing and reading."""
    return parallel_state.get_data_parallel_group(with_context_parallel=True)


def _local_bytes(state: TrainState, *, with_optimizer: bool) -> int:
    tensors = list(take_local(state.chunks))
    if with_optimizer:
        for part in optimizers.parts(state.optimizer):
            for values in part.optimizer.state.values():
                tensors += [v for v in values.values() if isinstance(v, torch.Tensor)]
    return sum(t.numel() * t.element_size() for t in tensors)


def take_local(chunks: Sequence[Any]) -> Iterator[torch.Tensor]:
    """This rank's parameters, each replica's share of them."""
    for chunk in chunks:
        yield from unwrap_model(chunk).parameters()


# ---- optimizer -------------------------------------------------------------------------------------------------------


def _is_distributed(optimizer: Any) -> bool:
    return any(hasattr(part, "gbuf_ranges") for part in optimizers.parts(optimizer))


def _optimizer_kind(optimizer: Any) -> str:
    """What must agree for optimizer state to be loadable. Experts have an optimizer of their own when ranks share them.
    Collective."""
    local = [type(part).__name__ for part in optimizers.parts(optimizer)]
    most: list[str] = max(gather_objects(local), key=len)
    return " + ".join(most)


def _check_optimizer(saved: str, ours: str, directory: Path) -> None:
    if saved == "left out":
        raise CheckpointError(f"{directory} has no optimizer state (--no-save-optim): --no-load-optim goes on without")
    if saved != ours:
        raise CheckpointError(
            f"{directory} was saved with the optimizer {saved}, this layout has {ours}, and megatron-core cannot turn one "
            "into the other: keep --use-distributed-optimizer, and --expert-model-parallel-size at 1 or above 1, as they "
            "were, or set --no-load-optim to start with new moments"
        )


@contextlib.contextmanager
def _steps_of_torch_adam(optimizer: Any) -> Iterator[None]:
    """Let a distributed optimizer over torch's AdamW load: it looks for a step count among each parameter's tensors, and
    leaves all parameters with one tensor of it, which AdamW would then count up once a parameter."""
    parts = [p for p in optimizers.parts(optimizer) if hasattr(p, "_set_main_param_and_optimizer_states")]
    parts = [p for p in parts if isinstance(p.optimizer, (torch.optim.AdamW, torch.optim.Adam))]
    for part in parts:
        part._set_main_param_and_optimizer_states = types.MethodType(_set_with_step, part)
    try:
        yield
    finally:
        for part in parts:
            del part._set_main_param_and_optimizer_states
        for inner in optimizers.torch_optimizers(optimizer):
            for values in inner.state.values():
                values["step"] = values["step"].detach().clone()


def _set_with_step(part: Any, parameter: Any, tensors: dict[str, Any]) -> None:
    group, place = part.model_param_group_index_map[parameter]
    state = part.optimizer.state[part.optimizer.param_groups[group]["params"][place]]
    if "step" in state:
        tensors.setdefault("step", state["step"])
    type(part)._set_main_param_and_optimizer_states(part, parameter, tensors)
