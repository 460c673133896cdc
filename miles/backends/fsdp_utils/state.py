"""What a checkpoint of the FSDP trainer holds, and how it is written and read. Everything here is collective."""

from __future__ import annotations

import json
import logging
import random
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.tensor import DTensor

from miles.backends.fsdp_utils.loading import LoadedPolicy, persistent_buffers, reshard
from miles.backends.training_utils.checkpoint import CheckpointError
from miles.backends.training_utils.lr_schedule import LRSchedule
from miles.backends.training_utils.model_identity import MODEL, check_same_model, identity, recorded
from miles.utils.seeds import derive_seed

logger = logging.getLogger(__name__)

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
    _check_room(tensors, directory)
    on_every_rank(lambda: dcp.save(tensors, checkpoint_id=directory / _TENSORS), directory)
    # An optimizer that has taken no step has no moments to save, which is not the same as leaving them out.
    moments = "left out" if not kept else "saved" if state.optimizer and state.optimizer.state else "none yet"

    def small_files() -> None:
        torch.save(rng_state(), directory / f"rng_rank{rank}.pt")
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
        _load_rng(directory, args)


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


# ---- random generators -----------------------------------------------------------------------------------------------


def rng_state() -> dict[str, Any]:
    """Every generator of this process."""
    state = {"torch": torch.get_rng_state(), "numpy": np.random.get_state(), "python": random.getstate()}
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def seed_generators(seed: int) -> None:
    torch.manual_seed(seed)
    np.random.seed(seed % 2**32)
    random.seed(seed)


def restore_rng(state: dict[str, Any]) -> None:
    torch.set_rng_state(state["torch"])
    np.random.set_state(state["numpy"])
    random.setstate(state["python"])
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])


def _load_rng(directory: Path, args: Any) -> None:
    rank, world = dist.get_rank(), dist.get_world_size()
    saved = len(list(directory.glob("rng_rank*.pt")))
    if saved == world:
        restore_rng(torch.load(directory / f"rng_rank{rank}.pt", weights_only=False))
        return
    seed = derive_seed(getattr(args, "seed", 0), "resume", directory.name, world, rank)
    logger.warning(
        "%s was written by %d ranks, this run has %d: random generators start from seeds", directory, saved, world
    )
    seed_generators(seed)


# ---- failures --------------------------------------------------------------------------------------------------------


def on_every_rank(work: Callable[[], Any], where: Path) -> None:
    """Run `work` on this rank and agree on the outcome: a failure of one rank raises CheckpointError on all."""
    problem: str | None = None
    cause: BaseException | None = None
    try:
        work()
    except CheckpointException as error:  # torch has told all ranks already
        cause = error
        problem = "; ".join(f"{type(e).__name__}: {e}" for e, _ in error.failures.values())
    except Exception as error:
        cause, problem = error, f"{type(error).__name__}: {error}"
    problems: list[str | None] = [None] * dist.get_world_size()
    dist.all_gather_object(problems, problem)
    failed = [f"rank {rank}: {text}" for rank, text in enumerate(problems) if text is not None]
    if failed:
        raise CheckpointError(
            f"writing {where} failed, {shutil.disk_usage(where).free / 1e9:.2f} GB are free there; earlier checkpoints are "
            f"untouched. {'; '.join(failed)}"
        ) from cause


def _check_room(tensors: dict[str, Any], directory: Path) -> None:
    """Raise CheckpointError on every rank where the disk cannot hold what is about to be written."""
    needed = torch.tensor(
        sum(local_bytes(t) for t in tensors.values() if isinstance(t, torch.Tensor)), dtype=torch.int64
    )
    dist.all_reduce(needed)
    room: list[int] = [shutil.disk_usage(directory).free]
    dist.broadcast_object_list(room, src=0)
    if room[0] < int(needed):
        raise CheckpointError(
            f"a checkpoint needs {int(needed) / 1e9:.2f} GB and {directory} has {room[0] / 1e9:.2f} GB free: make room, "
            "or point --save elsewhere. Nothing was written; earlier checkpoints are untouched."
        )


def local_bytes(tensor: torch.Tensor) -> int:
    """Bytes of this rank's part."""
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return local.numel() * local.element_size()
