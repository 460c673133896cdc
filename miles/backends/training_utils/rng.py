"""The random generators of a trainer rank: seeded, saved with a checkpoint, restored where the ranks are as many."""

from __future__ import annotations

import logging
import random
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from miles.utils.seeds import derive_seed

logger = logging.getLogger(__name__)


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


def save_rng(directory: Path, **more: Any) -> None:
    """Write this rank's generators, and what else it is told, below a checkpoint."""
    torch.save(rng_state() | more, directory / f"rng_rank{dist.get_rank()}.pt")


def load_rng(directory: Path, args: Any) -> dict[str, Any] | None:
    """Restore this rank's generators; returns what was saved, or None where other ranks saved it: then they are seeded."""
    rank, world = dist.get_rank(), dist.get_world_size()
    saved = len(list(directory.glob("rng_rank*.pt")))
    if saved == world:
        state: dict[str, Any] = torch.load(directory / f"rng_rank{rank}.pt", weights_only=False)
        restore_rng(state)
        return state
    seed = derive_seed(getattr(args, "seed", 0), "resume", directory.name, world, rank)
    logger.warning(
        "%s was written by %d ranks, this run has %d: random generators start from seeds", directory, saved, world
    )
    seed_generators(seed)
    return None
