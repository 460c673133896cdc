"""The trainer's ranks, as the driver sees them."""

from __future__ import annotations

import asyncio
import re
from typing import Any

import ray

from miles.ray.placement import Placement
from miles.ray.rollout_manager import RolloutBatch
from miles.ray.train_actor import RemoteTrainActor, TrainerInfo
from miles.utils.memory import KEEP_FREED_MEMORY
from miles.utils.process import tail
from miles.utils.process_logging import log_path


class TrainerDied(RuntimeError):
    """A trainer rank raised or its process ended. The message carries its own traceback or its last lines."""


class TrainGroup:
    """World-size TrainActors. Every call runs on all ranks, and the first failure ends the wait for the others."""

    def __init__(self, args: Any, placement: Placement, role: str = "trainer") -> None:
        """`role`: `trainer`, or `critic` for a group that shares the trainer's devices."""
        self.args, self.role = args, role
        world = placement.demand.trainer
        shared = args.colocate or placement.demand.gpus or args.advantage_estimator == "ppo"
        share = 0.4 if shared else 1.0
        env = KEEP_FREED_MEMORY if args.train_device == "cpu" else {}
        self.actors = [
            RemoteTrainActor.options(**placement.actor_options(rank, share), runtime_env={"env_vars": env}).remote(
                args, rank, world, role
            )
            for rank in range(world)
        ]
        self.info: TrainerInfo | None = None

    async def prepare(self) -> None:
        """Ranks are up and have imported what they need; their devices are untouched."""
        await self._all("prepare")

    async def init(self) -> TrainerInfo:
        address, port = await self._first(self.actors[0].rendezvous.remote())
        infos = await self._all("init", address, port)
        starts = {info.start_rollout_id for info in infos}
        if len(starts) != 1:
            raise TrainerDied(f"trainer ranks loaded different checkpoints: next rollout ids {sorted(starts)}")
        self.info, self._dp_ranks = infos[0], [info.dp_rank for info in infos]
        return infos[0]

    async def watch(self) -> None:
        """Raise TrainerDied when a rank's process ends; never returns otherwise."""
        calls = [self._call(rank, "idle", actor.wait_for_end.remote()) for rank, actor in enumerate(self.actors)]
        await asyncio.gather(*calls)

    async def train(self, batch: RolloutBatch, values: dict[int, Any] | None = None) -> list[dict[str, float]]:
        """Returns metrics, one dict an optimizer step, of rank 0; they are reduced over ranks.

        Args:
            values: references to the critic's, by data-parallel rank.
        """
        results = await self._all("train", batch.data_ref, values)
        for name in ("perf/train_busy_time",):
            results[0][-1][name] = max(steps[-1][name] for steps in results)
        return results[0]

    async def train_critic(self, batch: RolloutBatch) -> tuple[list[dict[str, float]], dict[int, Any]]:
        """As `train`, for a critic; also references to its values, which stay in the object store."""
        refs = [actor.train_critic.options(num_returns=2).remote(batch.data_ref) for actor in self.actors]
        results = await self._joined("train_critic", [metrics for metrics, _ in refs])
        values = {dp_rank: ref for dp_rank, (_, ref) in zip(self._dp_ranks, refs, strict=True)}
        return results[0], values

    async def sleep(self, *, keep_weights: bool) -> None:
        """Ranks give their device memory back; with `keep_weights` all but what an update sends."""
        await self._all("sleep", keep_weights)

    async def wake(self) -> None:
        await self._all("wake")

    async def save(self, rollout_id: int, driver_state: dict[str, Any]) -> None:
        await self._all("save", rollout_id, driver_state)

    async def export_hf(self, directory: str) -> None:
        await self._all("export_hf", directory)

    async def after_save(self, rollout_id: int, checkpoint: str, exported: str | None) -> None:
        await self._all("after_save", rollout_id, checkpoint, exported)

    async def _all(self, method: str, *args: Any) -> list[Any]:
        return await self._joined(method, [getattr(actor, method).remote(*args) for actor in self.actors])

    async def _joined(self, method: str, refs: list[Any]) -> list[Any]:
        tasks = [asyncio.ensure_future(self._call(rank, method, ref)) for rank, ref in enumerate(refs)]
        try:
            return list(await asyncio.gather(*tasks))
        except BaseException:
            # A rank that raised leaves its peers in a collective; prefer the error that is not their complaint.
            await asyncio.wait(tasks, timeout=2.0)
            for task in tasks:
                task.cancel()
            raise _root_cause([t.exception() for t in tasks if t.done() and not t.cancelled()]) from None

    async def _first(self, ref: Any) -> Any:
        return await self._call(0, "rendezvous", ref)

    async def _call(self, rank: int, method: str, ref: Any) -> Any:
        try:
            return await ref
        except ray.exceptions.RayTaskError as error:
            raise TrainerDied(f"{self.role} rank {rank} failed in {method}:\n{error}") from None
        except ray.exceptions.RayActorError as error:
            lines = tail(log_path(self.args.run_dir, f"{self.role}_{rank}"))
            told = re.sub(r"\s*(Some common causes include|If the process was killed by).*", "", str(error), flags=re.S)
            raise TrainerDied(f"{self.role} rank {rank} died in {method}: {told}\nits last lines:\n{lines}") from None


def _root_cause(errors: list[BaseException | None]) -> BaseException:
    """The failure that came of itself, rather than of a peer's connection that closed."""
    found = [e for e in errors if e is not None]
    symptoms = ("Connection closed by peer", "Connection reset", "gloo", "NCCL", "Broken pipe")
    own = [e for e in found if not any(s in str(e) for s in symptoms)]
    return (own or found or [asyncio.CancelledError()])[0]
