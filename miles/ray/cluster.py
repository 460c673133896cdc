"""Everything one run starts, as the drivers use it: each method is one line of the algorithm."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import time
from collections.abc import Awaitable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import ray

from miles.backends.engine_api.topology import plan_engines
from miles.backends.training_utils.checkpoint import CheckpointStore
from miles.ray.coordinator import RemoteWeightUpdateCoordinator
from miles.ray.intervals import Intervals
from miles.ray.memory_turns import MemoryTurns
from miles.ray.placement import Placement, connect_ray, demand_of
from miles.ray.refs import answer
from miles.ray.rollout_manager import RemoteRolloutManager, RolloutBatch
from miles.ray.train_actor import CRITIC
from miles.ray.train_group import TrainGroup
from miles.tracking.progress import Progress
from miles.tracking.tracker import Tracker
from miles.utils.laps import Laps, process_start
from miles.utils.process_tree import ProcessId, descendants, end

logger = logging.getLogger(__name__)
STOP_TIMEOUT_S = 30.0
LEFTOVER_GRACE_S = 5.0  # for what Ray started, after it was shut down
T = TypeVar("T")


class NothingToDo(RuntimeError):
    """The loaded checkpoint is already at the last rollout."""


class Cluster:
    """Use as `async with await Cluster.start(args) as cluster`: whatever happens, its processes end with the block."""

    def __init__(self, args: Any) -> None:
        self.args = args
        self.trainer: TrainGroup | None = None
        self.critic: TrainGroup | None = None
        self.manager: Any = None
        self.coordinator: Any = None
        self.placement: Placement | None = None
        self.start_rollout_id = 0
        self.num_rollout = args.num_rollout
        self.rollouts_per_epoch: int | None = None
        self._times: dict[str, float] = {}
        self._metrics: dict[str, float] = {}
        self._trainer_death: asyncio.Task[None] | None = None
        self._not_rays: set[ProcessId] = set()  # children from before Ray: a tracker's, say
        self._pending: dict[int, asyncio.Task[RolloutBatch]] = {}
        self._startup = Laps(since=process_start())

    # ---- life ------------------------------------------------------------------------------------------------------

    @classmethod
    async def start(cls, args: Any) -> Cluster:
        cluster = cls(args)
        try:
            await cluster._start()
        except BaseException:
            await cluster.stop()
            raise
        return cluster

    async def _start(self) -> None:
        args = self.args
        Path(args.run_dir, "logs").mkdir(parents=True, exist_ok=True)
        self.tracker = Tracker(args)
        self.progress = Progress(args)
        self._startup.lap("checks")
        demand = demand_of(args)
        self.progress.status("starting Ray")
        self._not_rays = set(descendants())
        connect_ray(demand)
        several = any(spec.devices > 1 for spec in plan_engines(args))
        self.placement = Placement(demand, args.cluster_wait_timeout, ask_for_gpus=several)
        self._startup.lap("ray")
        parts = ["engines"] * (not args.debug_train_only) + ["trainer"] * (not args.debug_rollout_only)
        self.progress.status(f"starting {' and '.join(parts)}")
        self.manager = RemoteRolloutManager.options(num_cpus=0, max_concurrency=64).remote(args, self.placement)
        started = asyncio.ensure_future(answer(self.manager.start.remote()))
        if not args.debug_rollout_only:
            self.trainer = TrainGroup(args, self.placement)
            if args.offload_rollout:  # engines size themselves by the memory that they find
                await self._unless_fails(started, self.trainer.prepare())
                await started
                self._startup.lap("engines")
                await self.manager.release_engines.remote()
            info = await self._unless_fails(started, self.trainer.init())
            self._trainer_death = asyncio.create_task(self.trainer.watch())
            self.start_rollout_id = (
                args.start_rollout_id if args.start_rollout_id is not None else info.start_rollout_id
            )
            if args.advantage_estimator == "ppo" and args.compute_advantages_and_returns:
                await self._start_critic(info.start_rollout_id)
            await self.manager.set_train_parallel_config.remote(info.parallel)
        facts = await started
        self._startup.lap("trainer" if args.offload_rollout else "engines_and_trainer")
        self._count_rollouts(facts["dataset_length"])
        await self._restore()
        self.due = Intervals(args, self.start_rollout_id, self.num_rollout, self.rollouts_per_epoch)
        self._turns = MemoryTurns(
            args, self.manager, self.trainer, self._while_trainer_lives, self._timed, critic=self.critic
        )
        if self._updates_weights:
            assert self.trainer is not None
            self.coordinator = RemoteWeightUpdateCoordinator.options(num_cpus=0, max_concurrency=16).remote(
                args, self.manager, self.trainer.actors, self._restored_version
            )
            await self.manager.set_coordinator.remote(self.coordinator)

    async def _start_critic(self, start_rollout_id: int) -> None:
        """Beside the trainer, on its devices: the one loads while the other has given its memory back."""
        from miles.backends.training_utils.critic import critic_args

        assert self.trainer is not None and self.placement is not None
        if self.args.offload_train:
            await self.trainer.sleep(keep_weights=False)
        self.critic = TrainGroup(critic_args(self.args, start_rollout_id), self.placement, CRITIC)
        await self.critic.init()
        assert self._trainer_death is not None
        self._trainer_death.cancel()
        self._trainer_death = asyncio.create_task(self._watch_both(self.trainer, self.critic))
        if self.args.offload_train:
            await self.critic.sleep(keep_weights=False)
            await self.trainer.wake()

    async def _watch_both(self, *groups: TrainGroup) -> None:
        """Raise when a rank of any group dies."""
        await asyncio.gather(*(group.watch() for group in groups))

    async def _unless_fails(self, other: asyncio.Future, work: Awaitable[T]) -> T:
        """Wait for work while `other` goes on beside it; a failure of `other` is told at once (bad data, say)."""
        task = asyncio.ensure_future(work)
        await asyncio.wait({task, other}, return_when=asyncio.FIRST_COMPLETED)
        if other.done() and not task.done() and other.exception() is not None:
            task.cancel()
            other.result()  # raises
        return await task

    @property
    def _updates_weights(self) -> bool:
        args = self.args
        return not (args.debug_rollout_only or args.debug_train_only or args.debug_skip_weight_update)

    def _count_rollouts(self, dataset_length: int | None) -> None:
        args = self.args
        if dataset_length:
            self.rollouts_per_epoch = max(dataset_length // args.rollout_batch_size, 1)
        if self.num_rollout is None:
            if self.rollouts_per_epoch is None:
                raise ValueError("--num-epoch needs a data source with a length; set --num-rollout instead")
            self.num_rollout = self.rollouts_per_epoch * args.num_epoch

    async def _restore(self) -> None:
        """Put data source, weight version and tracker where the checkpoint left them."""
        self._restored_version = 0
        if self.start_rollout_id == 0:
            return
        state = self.trainer.info.driver_state if self.trainer is not None and self.trainer.info else None
        if state is not None:
            self._restored_version = state["weight_version"]
            self.tracker.load_state_dict(state["tracker"], resumed_at=self.start_rollout_id)
        await self.manager.load.remote(self.start_rollout_id - 1)
        if self.start_rollout_id >= self.num_rollout > 0:
            raise NothingToDo(
                f"the checkpoint in {self.args.load} has finished rollout {self.start_rollout_id - 1} and --num-rollout "
                f"is {self.num_rollout}: nothing is left to do. Raise --num-rollout to go on, or point --save and "
                "--load to a new folder to start afresh."
            )

    async def __aenter__(self) -> Cluster:
        return self

    async def __aexit__(self, *exc: Any) -> None:
        await self.stop()

    async def stop(self) -> None:
        """End every process that this run started."""
        for task in [*self._pending.values(), self._trainer_death]:
            if task is not None:
                task.cancel()
        if hasattr(self, "progress"):
            self.progress.close()
        if self.manager is not None:
            with contextlib.suppress(ray.exceptions.RayError, TimeoutError, asyncio.CancelledError):
                await asyncio.wait_for(answer(self.manager.stop.remote()), STOP_TIMEOUT_S)
        actors = [
            self.manager,
            self.coordinator,
            *(a for group in (self.trainer, self.critic) if group for a in group.actors),
        ]
        for actor in filter(None, actors):
            with contextlib.suppress(Exception):
                ray.kill(actor)
        if self.placement is not None:
            with contextlib.suppress(Exception):
                self.placement.remove()
        if hasattr(self, "tracker"):
            self.tracker.close()
        if ray.is_initialized() and not os.environ.get("RAY_ADDRESS"):
            started = [process for process in descendants() if process not in self._not_rays]
            ray.shutdown()
            await asyncio.to_thread(end, started, LEFTOVER_GRACE_S)

    # ---- the loop --------------------------------------------------------------------------------------------------

    def steps(self) -> Iterator[int]:
        """Rollout ids from where the checkpoint ended; each step's times and metrics are logged when it ends."""
        self.progress.begin(self.start_rollout_id, self.last_step + 1)
        for rollout_id in range(self.start_rollout_id, self.last_step + 1):
            started = time.monotonic()
            self._times, self._metrics = {}, {}
            if self._startup.seconds:
                self._log(
                    {f"perf/startup/{k}_s": v for k, v in self._startup.take().items()}, "rollout/step", rollout_id
                )
            yield rollout_id
            self._finish_step(rollout_id, time.monotonic() - started)

    @property
    def last_step(self) -> int:
        """The last rollout id of this process: `--num-rollout`, or sooner under `--debug-exit-after-rollout`."""
        end = self.num_rollout
        if self.args.debug_exit_after_rollout is not None:
            end = min(end, self.start_rollout_id + self.args.debug_exit_after_rollout)
        return end - 1

    def _finish_step(self, rollout_id: int, seconds: float) -> None:
        times = {f"perf/{name}_time": value for name, value in self._times.items()}
        times["perf/step_time"] = seconds
        # A part that timed itself has said so already; a second point at the same step would only confuse plots.
        times = {name: value for name, value in times.items() if name not in self._metrics}
        self.tracker.log(times, step_key="rollout/step", step=rollout_id)
        self.progress.step(rollout_id, self._metrics | times)

    @contextlib.contextmanager
    def _timed(self, name: str) -> Iterator[None]:
        self.progress.phase(name)
        started = time.monotonic()
        try:
            yield
        finally:
            self._times[name] = self._times.get(name, 0.0) + time.monotonic() - started

    def _log(self, metrics: dict[str, float], step_key: str, step: int) -> None:
        self._metrics |= metrics
        self.tracker.log(metrics, step_key=step_key, step=step)

    def begin_generate(self, rollout_id: int) -> None:
        """Start a batch that a later `generate` of the same id waits for."""
        if rollout_id <= self.last_step:
            self._pending[rollout_id] = asyncio.create_task(self._generate(rollout_id))

    async def generate(self, rollout_id: int) -> RolloutBatch:
        """One batch of trajectories, planned and sharded."""
        await self._turns.to_engines()
        with self._timed("train_wait"):
            pending = self._pending.pop(rollout_id, None) or self._generate(rollout_id)
            batch = await self._while_trainer_lives(pending)
            # Age counts from the weights that serve now, at train time, not from those of the time it was requested.
            batch.metrics |= await self.manager.measure_staleness.remote(rollout_id)
        return batch

    async def _generate(self, rollout_id: int) -> RolloutBatch:
        return await self.manager.generate.remote(rollout_id)

    async def generation_is_idle(self) -> None:
        """Return when no batch is being generated; a failed one raises where it is waited for."""
        if self._pending:
            await self._while_trainer_lives(asyncio.wait(self._pending.values()))

    async def _while_trainer_lives(self, work: Awaitable[T]) -> T:
        """Wait for work of others; the death of a trainer rank ends the wait, and is what is told."""
        task = asyncio.ensure_future(work)
        death = self._trainer_death
        if death is None:
            return await task
        try:
            await asyncio.wait({task, death}, return_when=asyncio.FIRST_COMPLETED)
            if task.done() and not task.cancelled() and task.exception() is not None:
                await asyncio.wait(
                    {death}, timeout=1.0
                )  # work that fails of a rank's death may fail before it is known
            if death.done():
                death.result()  # raises
            return await task
        finally:
            task.cancel()  # where this wait was given up: nobody asks for its result any more

    async def train(self, rollout_id: int, batch: RolloutBatch) -> None:
        """All optimizer steps of one batch; the batch's data is dropped afterwards."""
        self._log(batch.metrics, "rollout/step", rollout_id)
        if self.trainer is None:  # --debug-rollout-only
            return
        values = await self._train_critic(rollout_id, batch) if self.critic is not None else None
        if self.critic is not None and rollout_id < self.args.num_critic_only_steps:
            batch.data_ref.clear()
            return
        await self._turns.to_trainer()
        with self._timed("train"):
            steps = await self.trainer.train(batch, values)
        batch.data_ref.clear()
        for i, metrics in enumerate(steps):
            # What was measured where the batch was made is not said twice; contracts are, of what reached the trainer.
            told = {k for k in batch.metrics if not k.startswith("contract/")}
            rollout_side = {k: v for k, v in metrics.items() if not k.startswith("train/") and k not in told}
            train_side = {k: v for k, v in metrics.items() if k.startswith("train/")}
            if rollout_side:
                self._log(rollout_side, "rollout/step", rollout_id)
            if train_side:
                self._log(train_side, "train/step", rollout_id * len(steps) + i)

    async def _train_critic(self, rollout_id: int, batch: RolloutBatch) -> dict[int, Any]:
        """The critic's optimizer steps; returns references to its values from before them, by data-parallel rank."""
        assert self.critic is not None
        await self._turns.to_critic()
        with self._timed("critic_train"):
            steps, values = await self.critic.train_critic(batch)
        for i, metrics in enumerate(steps):
            own = {f"train/critic-{k.removeprefix('train/')}": v for k, v in metrics.items() if k.startswith("train/")}
            self._log(own, "train/step", rollout_id * len(steps) + i)
        return values

    async def update_weights(self, rollout_id: int | None = None) -> None:
        """Bring the engines to the trainer's weights, verified; the weight version grows by one."""
        if not self._updates_weights:
            return
        await self._turns.to_update()
        with self._timed("update_weights"):
            metrics = await self._while_trainer_lives(answer(self.coordinator.update.remote()))
        await self._turns.to_engines()
        if rollout_id is None:
            self._startup.lap("first_update")
        else:
            self._log(metrics, "rollout/step", rollout_id)

    async def evaluate(self, rollout_id: int) -> None:
        await self._turns.to_engines()
        with self._timed("eval"):
            metrics = await self._while_trainer_lives(answer(self.manager.evaluate.remote(rollout_id)))
        self._log(metrics, "eval/step", self.tracker.compute_rollout_step(rollout_id))

    async def save(self, rollout_id: int) -> None:
        """One checkpoint of everything, whole or absent, and the Hugging Face export when asked for."""
        if self.trainer is None:
            return
        args = self.args
        version = await self.coordinator.current_version.remote() if self.coordinator else 0
        state = {"weight_version": version, "tracker": self.tracker.state_dict()}
        if args.save and self.critic is not None:  # first: a checkpoint of the actor always has its critic's beside it
            await self._turns.to_critic()
            with self._timed("save"):
                await self.critic.save(rollout_id, state)
        await self._turns.to_trainer()
        with self._timed("save"):
            if args.save:
                await self.manager.save.remote(rollout_id)
                await self.trainer.save(rollout_id, state)
            exported = args.save_hf.format(rollout_id=rollout_id) if args.save_hf else None
            if exported:
                await self.trainer.export_hf(exported)
            if args.save and args.custom_megatron_post_save_hook_path:
                await self.trainer.after_save(rollout_id, str(CheckpointStore(args.save).path(rollout_id)), exported)
        if args.save_trigger_sentinel:
            Path(args.save_trigger_sentinel).unlink(missing_ok=True)

    def summarize(self) -> None:
        """Print the summary table and draw the reward plot from what the run logged."""
        from miles.tracking.summary import summarize

        self.progress.close()
        self.tracker.close()
        summarize(self.args.run_dir)
