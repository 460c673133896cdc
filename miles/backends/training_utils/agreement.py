"""What every rank has to say, and work that counts only when all of them could do their part."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException

from miles.backends.training_utils.checkpoint import CheckpointError


def gather_objects(value: Any, group: Any = None) -> list[Any]:
    """`value` of every rank of `group` (None: all), by rank; only ours where no process group is up. Collective."""
    if not dist.is_initialized():
        return [value]
    values: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(values, value, group=group)
    return values


def on_every_rank(work: Callable[[], Any], where: Path) -> None:
    """Run `work` on this rank and agree on the outcome: a failure of one rank raises CheckpointError on all. Collective."""
    problem: str | None = None
    cause: BaseException | None = None
    try:
        work()
    except CheckpointException as error:  # torch has told all ranks already
        cause = error
        problem = "; ".join(f"{type(e).__name__}: {e}" for e, _ in error.failures.values())
    except Exception as error:
        cause, problem = error, f"{type(error).__name__}: {error}"
    failed = [f"rank {rank}: {text}" for rank, text in enumerate(gather_objects(problem)) if text is not None]
    if failed:
        raise CheckpointError(
            f"writing {where} failed, {shutil.disk_usage(where).free / 1e9:.2f} GB are free there; earlier checkpoints are "
            f"untouched. {'; '.join(failed)}"
        ) from cause


def check_room(local_bytes: int, directory: Path) -> None:
    """Raise CheckpointError on every rank where the disk cannot hold what all of them are about to write. Collective."""
    needed = torch.tensor(local_bytes, dtype=torch.int64)
    dist.all_reduce(needed)
    room: list[int] = [shutil.disk_usage(directory).free]
    dist.broadcast_object_list(room, src=0)
    if room[0] < int(needed):
        raise CheckpointError(
            f"a checkpoint needs {int(needed) / 1e9:.2f} GB and {directory} has {room[0] / 1e9:.2f} GB free: make room, "
            "or point --save elsewhere. Nothing was written; earlier checkpoints are untouched."
        )
