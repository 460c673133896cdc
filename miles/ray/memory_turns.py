"""Engines, trainer and critic that share devices take turns on their memory."""

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
        trainer: None under `--debug-rollout-only`. critic: None without PPO.
        watched: waits for engines and raises if the trainer dies meanwhile.
        timed: books the seconds of a part of the step.
    """

    def __init__(
        self,
        args: Any,
        manager: Any,
        trainer: TrainGroup | None,
        watched: Watched,
        timed: Timed,
        critic: TrainGroup | None = None,
    ) -> None:
        self._args, self._manager = args, manager
        self._groups = {"trainer": trainer, "critic": critic}
        self._watched, self._timed = watched, timed
        self._owner = "engines" if trainer is None else "trainer"  # it loads last

    async def to_trainer(self) -> None:
        """The trainer has the memory; engines are idle, and keep only what they cannot give back."""
        await self._to_group("trainer")

    async def to_critic(self) -> None:
        """The critic has it."""
        await self._to_group("critic")

    async def _to_group(self, name: str) -> None:
        if self._owner == name:
            return
        before, self._owner = self._owner, name
        if before != "engines":
            await self._give_back(before, keep_weights=False)
        elif self._args.offload_rollout:
            with self._timed("release_engines"):
                await self._watched(answer(self._manager.release_engines.remote()))
        group = self._groups[name]
        if self._args.offload_train and group is not None:
            with self._timed(f"wake_{name}"):
                await group.wake()

    async def to_update(self) -> None:
        """Both sides have room for the weights, and for nothing else."""
        await self.to_trainer()
        await self._give_back("trainer", keep_weights=True)
        await self._resume_engines(weights_only=True)

    async def to_engines(self) -> None:
        """The engines have it, all of it."""
        if self._owner == "engines":
            return
        before, self._owner = self._owner, "engines"
        await self._give_back(before, keep_weights=False)
        await self._resume_engines(weights_only=False)

    async def _give_back(self, name: str, *, keep_weights: bool) -> None:
        group = self._groups[name]
        if self._args.offload_train and group is not None:
            with self._timed(f"sleep_{name}"):
                await group.sleep(keep_weights=keep_weights)

    async def _resume_engines(self, *, weights_only: bool) -> None:
        if self._args.offload_rollout:
            with self._timed("resume_engines"):
                await self._watched(answer(self._manager.resume_engines.remote(weights_only)))
