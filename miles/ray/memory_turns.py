"""Engines and trainer that share devices take turns on their memory."""

from __future__ import annotations

import contextlib
from collections.abc import Awaitable, Callable
from typing import Any

from miles.ray.refs import answer
from miles.ray.train_group import TrainGroup

Watched = Callable[[Awaitable[Any]], Awaitable[Any]]
Timed = Callable[[str], contextlib.AbstractContextManager[None]]


class MemoryTurns:
    """Which side has the memory of devices that both use. Without offload a turn costs nothing.

    Args:
        trainer: None under `--debug-rollout-only`.
        watched: waits for engines and raises if the trainer dies meanwhile.
        timed: books the seconds of a part of the step.
    """

    def __init__(self, args: Any, manager: Any, trainer: TrainGroup | None, watched: Watched, timed: Timed) -> None:
        self._args, self._manager, self._trainer = args, manager, trainer
        self._watched, self._timed = watched, timed
        self._trainers = trainer is not None  # it loads last

    async def to_trainer(self) -> None:
        """The trainer has the memory; engines are idle, and keep only what they cannot give back."""
        if self._trainers:
            return
        self._trainers = True
        if self._args.offload_rollout:
            with self._timed("release_engines"):
                await self._watched(answer(self._manager.release_engines.remote()))
        if self._args.offload_train and self._trainer is not None:
            with self._timed("wake_trainer"):
                await self._trainer.wake()

    async def to_update(self) -> None:
        """Both sides have room for the weights, and for nothing else."""
        await self.to_trainer()
        await self._give_back(keep_weights=True)
        await self._resume_engines(weights_only=True)

    async def to_engines(self) -> None:
        """The engines have it, all of it."""
        if not self._trainers:
            return
        self._trainers = False
        await self._give_back(keep_weights=False)
        await self._resume_engines(weights_only=False)

    async def _give_back(self, *, keep_weights: bool) -> None:
        if self._args.offload_train and self._trainer is not None:
            with self._timed("sleep_trainer"):
                await self._trainer.sleep(keep_weights=keep_weights)

    async def _resume_engines(self, *, weights_only: bool) -> None:
        if self._args.offload_rollout:
            with self._timed("resume_engines"):
                await self._watched(answer(self._manager.resume_engines.remote(weights_only)))
