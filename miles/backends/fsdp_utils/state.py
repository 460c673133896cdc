"""What a checkpoint of the FSDP trainer holds, and how it is written and read. Everything here is collective."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.tensor import DTensor

from miles.backends.fsdp_utils.loading import LoadedPolicy, persistent_buffers, reshard
from miles.backends.training_utils.agreement import check_room, on_every_rank
from miles.backends.training_utils.checkpoint import CheckpointError
from miles.backends.training_utils.lr_schedule import LRSchedule
from miles.backends.training_utils.model_identity import MODEL, check_same_model, identity, recorded
from miles.backends.training_utils.rng import load_rng, save_rng

_TENSORS = "fsdp"
_SCHEDULE = "lr_schedule.json"


@dataclass
class TrainState:
    """What is saved. `extra_models`: further weights that change while training (a moving reference)."""

    loaded: LoadedPolicy
    optimizer: torch.optim.Optimizer | None
    schedule: LRSchedule
    extra_models: dict[str, LoadedPolicy]


def save_state(state: TrainState, directory: Path, args: Any) -> None:
    """Write this rank's part below `directory`. Raises: CheckpointError on every rank when any rank could not write."""
    rank = dist.get_rank()
    kept = not getattr(args, "no_save_optim", False)
    tensors = _tensors(state, with_optimizer=kept)
    check_room(sum(local_bytes(t) for t in tensors.values() if isinstance(t, torch.Tensor)), directory)
    on_every_rank(lambda: dcp.save(tensors, checkpoint_id=directory / _TENSORS), directory)
    # An optimizer that has taken no step has no moments to save, which is not the same as leaving them out.
    moments = "left out" if not kept else "saved" if state.optimizer and state.optimizer.state else "none yet"

    def small_files() -> None:
        save_rng(directory)
        if rank == 0:
            (directory / _SCHEDULE).write_text(json.dumps(state.schedule.state_dict(), indent=2))
            model = fingerprint(state.loaded) | {"optimizer": moments, "hf_checkpoint": str(args.hf_checkpoint)}
            (directory / MODEL).write_text(json.dumps(model, indent=2))

    on_every_rank(small_files, directory)


def load_state(state: TrainState, directory: Path, args: Any) -> None:
    """Restore what `save_state` wrote, as far as the flags ask for it.

    Raises: CheckpointError when it is another model's, or lacks something that is asked for.
    """
    saved = recorded(directory)
    if saved.get("trainer", "fsdp") != "fsdp":
        raise CheckpointError(
            f"{directory} was written by the {saved['trainer']} trainer: resume with --train-backend {saved['trainer']}, or "
            "export it with --save-hf and start from that as --hf-checkpoint"
        )
    check_same_model(saved, fingerprint(state.loaded), directory, args.hf_checkpoint)
    finetune = getattr(args, "finetune", False)
    with_optimizer = state.optimizer is not None and not (finetune or getattr(args, "no_load_optim", False))
    if with_optimizer and saved["optimizer"] == "left out":
        raise CheckpointError(f"{directory} has no optimizer state (--no-save-optim): --no-load-optim goes on without")
    with_optimizer &= saved["optimizer"] == "saved"
    if with_optimizer:
        _prepare_optimizer(state)
    tensors = _tensors(state, with_optimizer=with_optimizer)
    dcp.load(tensors, checkpoint_id=directory / _TENSORS)
    reshard(state.loaded.module)
    if finetune:
        return
    schedule = json.loads((directory / _SCHEDULE).read_text())
    override = bool(getattr(args, "override_lr_scheduler", False))
    use = bool(getattr(args, "use_checkpoint_lr_scheduler", True)) and not override
    state.schedule.load_state_dict(schedule, use_checkpoint=use, override=override)
    if not getattr(args, "no_load_rng", False):
        load_rng(directory, args)


def _tensors(state: TrainState, *, with_optimizer: bool) -> dict[str, Any]:
    """The flat dictionary that is saved, or loaded in place."""
    models = {"model": state.loaded, **state.extra_models}
    tensors: dict[str, Any] = {}
    for tag, loaded in models.items():
        reshard(loaded.module)
        named = dict(loaded.module.named_parameters()) | persistent_buffers(loaded.module)
        tensors |= {f"{tag}.{name}": value.detach() for name, value in named.items()}
    if with_optimizer and state.optimizer is not None:
        for name, param in state.loaded.module.named_parameters():
            for key, value in state.optimizer.state.get(param, {}).items():
                tensors[f"optimizer.{name}.{key}"] = value
    return tensors


def _prepare_optimizer(state: TrainState) -> None:
    """Empty moments for every trained parameter, to be filled in place."""
    assert state.optimizer is not None
    for param in state.loaded.module.parameters():
        if param.requires_grad:
            moments = {key: torch.zeros_like(param.detach()) for key in ("exp_avg", "exp_avg_sq")}
            state.optimizer.state[param] = {
                "step": torch.zeros((), dtype=torch.float32, device=param.device),
                **moments,
            }


def fingerprint(loaded: LoadedPolicy) -> dict[str, Any]:
    """The identity of the model that was built, and how it is sharded."""
    reshard(loaded.module)
    named = dict(loaded.module.named_parameters()) | persistent_buffers(loaded.module)
    shapes = {name.removeprefix("hf."): list(value.shape) for name, value in named.items()}
    return identity(loaded.config.to_dict(), shapes) | {"world_size": dist.get_world_size()}


def local_bytes(tensor: torch.Tensor) -> int:
    """Bytes of this rank's part."""
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return local.numel() * local.element_size()
