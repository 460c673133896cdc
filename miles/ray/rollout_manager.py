"""The rollout side of a run, as one async Ray actor: data, rollout function, engines, evaluation."""

from __future__ import annotations

import asyncio
import copy
import logging
import time
from dataclasses import dataclass, field
from typing import Any

import ray

from miles.backends.training_utils.backend import TrainParallelConfig
from miles.ray.engine_fleet import CatchUp, EngineFleet
from miles.ray.placement import Placement
from miles.rollout.session.fleet import SessionServers
from miles.router.front import MilesRouter
from miles.utils.process_logging import redirect_to_log
from miles.weight_update.types import EngineEndpoint

logger = logging.getLogger(__name__)


@dataclass
class RolloutBatch:
    """What the driver passes to the trainer: object-store references, never data."""

    rollout_id: int
    data_ref: list[Any]  # one reference to a TrainShard for each data-parallel rank
    sample_indices: list[int | None]
    metrics: dict[str, float] = field(default_factory=dict)


class RolloutManager:
    """One per run, without a GPU."""

    def __init__(self, args: Any, placement: Placement | None) -> None:
        redirect_to_log(args.run_dir, "rollout_manager")
        self.args, self.placement = args, placement
        self.fleet: EngineFleet | None = None
        self.router: MilesRouter | None = None
        self.sessions: SessionServers | None = None
        self.parallel: TrainParallelConfig | None = None
        self.published_version = 0
        self._awaiting_training: dict[int, list] = {}  # samples of batches that the trainer has not taken yet
        self._data_states: dict[int, Any] = {}  # the data source as it stood when a rollout had drawn its prompts

    # ---- life ------------------------------------------------------------------------------------------------------

    async def start(self, version: int = 0) -> dict[str, Any]:
        """Read the data, build the rollout function, start the engines. Returns facts that the driver needs."""
        from miles.rollout.base_types import RolloutFnConstructorInput
        from miles.rollout.compat import load_rollout_function
        from miles.router.engine_pool import EnginePool
        from miles.utils.imports import load_function

        args = self.args
        self.data_source = await asyncio.to_thread(load_function(args.data_source_path), args)
        self.pool = self.engines = EnginePool(args)
        if args.use_miles_router:
            self.router = MilesRouter(args, self.pool, ray.util.get_node_ip_address())
            self.engines = self.router.front
        constructor_input = RolloutFnConstructorInput(args=args, data_source=self.data_source, engines=self.engines)
        self.rollout_fn = load_rollout_function(args.rollout_function_path, constructor_input)
        self.eval_fn = self.rollout_fn
        if args.eval_function_path not in (None, args.rollout_function_path):
            self.eval_fn = load_rollout_function(args.eval_function_path, constructor_input)
        if not args.debug_train_only:
            self.fleet = EngineFleet(args, self.placement, self.pool)
            await self.fleet.start(version)
            self.engines.models = self.fleet.pools
            args.sglang_model_routers = self.fleet.model_addresses()
            if self.router is not None:
                await self.router.start()
            if args.use_session_server is not None:
                self.sessions = SessionServers(args, self.engines, ray.util.get_node_ip_address())
                await self.sessions.start()
            if args.debug_rollout_only:
                self.fleet.admit([slot.index for slot in self.fleet.slots])
        length = len(self.data_source) if hasattr(self.data_source, "__len__") else None
        return {"dataset_length": length}

    def set_coordinator(self, coordinator: Any) -> None:
        """From now on a restarted engine is brought to the current version by `coordinator`."""
        if self.fleet is None:
            return

        async def catch_up(endpoint: EngineEndpoint) -> CatchUp:
            return await coordinator.bring_current.remote(endpoint)

        self.fleet.catch_up = catch_up

    def set_train_parallel_config(self, parallel: TrainParallelConfig) -> None:
        self.parallel = parallel

    async def stop(self) -> None:
        """End every engine and release what the data source holds."""
        from miles.rollout.rm_hub import close_rewards

        for servers in (self.sessions, self.router):
            if servers is not None:
                await servers.stop()
        if self.fleet is not None:
            await self.fleet.stop()
        await close_rewards()
        if hasattr(self.data_source, "close"):
            self.data_source.close()

    # ---- one rollout -----------------------------------------------------------------------------------------------

    async def generate(self, rollout_id: int) -> RolloutBatch:
        """Collect a batch, turn it into training data, plan it, and put one shard a data-parallel rank."""
        from miles.rollout.base_types import RolloutFnTrainInput
        from miles.rollout.debug_data import load_debug_rollout, save_debug_rollout
        from miles.rollout.postprocess import postprocess_rollout
        from miles.tracking.rollout_metrics import compute_rollout_metrics

        args, started = self.args, time.monotonic()
        version = self.published_version
        self._remember_data_state(rollout_id - 1)
        if args.load_debug_rollout_data:
            samples, extra = await asyncio.to_thread(load_debug_rollout, args, rollout_id), {}
            groups: Any = samples
        else:
            await self._refresh_stale_engines()
            output: Any = await self.rollout_fn(RolloutFnTrainInput(rollout_id=rollout_id, weight_version=version))
            groups, extra = output.samples, dict(output.metrics or {})
        seconds = time.monotonic() - started
        samples, metadata = postprocess_rollout(args, groups)
        save_debug_rollout(args, rollout_id, samples)
        metrics = compute_rollout_metrics(args, samples, seconds, rollout_id=rollout_id, extra=extra)
        if self.fleet is not None:
            metrics["rollout/engine_restarts"] = float(self.fleet.restarts)
        if self.sessions is not None:
            metrics["rollout/session_server_restarts"] = float(self.sessions.restarts)
        if self.router is not None:
            metrics["rollout/router_restarts"] = float(self.router.restarts)
        refs = [] if args.debug_rollout_only else await asyncio.to_thread(self._shard, rollout_id, samples, metadata)
        self._awaiting_training[rollout_id] = samples
        metrics["perf/rollout_busy_time"] = seconds
        metrics["perf/rollout_convert_time"] = time.monotonic() - started - seconds
        return RolloutBatch(rollout_id, refs, [s.index for s in samples], metrics)

    def measure_staleness(self, rollout_id: int) -> dict[str, float]:
        """`rollout/staleness/*` of a batch that the trainer takes now, against the version that is published now."""
        from miles.tracking.version_metrics import staleness_metrics

        samples = self._awaiting_training.pop(rollout_id)
        return staleness_metrics(samples, self.published_version) if self.published_version else {}

    def _shard(self, rollout_id: int, samples: list, metadata: dict[str, Any]) -> list[Any]:
        from miles.backends.training_utils.batching.planner import plan_batches
        from miles.backends.training_utils.batching.shards import split_train_data
        from miles.rollout.train_data import convert_samples_to_train_data

        if self.parallel is None:
            raise RuntimeError("the trainer has not told the rollout manager its layout yet")
        columns = convert_samples_to_train_data(self.args, samples, metadata)
        plan = plan_batches(columns, self.parallel, self.args)
        return [ray.put(shard) for shard in split_train_data(columns, plan, rollout_id)]

    async def _refresh_stale_engines(self) -> None:
        """Engines that came back while the trainer was ahead of them are caught up now, if they can be."""
        if self.fleet is not None:
            await asyncio.gather(*(self.fleet.refresh(slot.index) for slot in self.fleet.slots))
        for servers in (self.router, self.sessions):
            if servers is not None:
                await servers.sync()

    async def evaluate(self, rollout_id: int) -> dict[str, float]:
        from miles.rollout.base_types import RolloutFnEvalInput
        from miles.rollout.debug_data import save_debug_eval
        from miles.tracking.rollout_metrics import compute_eval_metrics

        started = time.monotonic()
        await self._refresh_stale_engines()
        output: Any = await self.eval_fn(
            RolloutFnEvalInput(rollout_id=rollout_id, weight_version=str(self.published_version))
        )
        save_debug_eval(self.args, rollout_id, output.data)
        metrics = compute_eval_metrics(self.args, output.data, rollout_id=rollout_id, extra=output.metrics)
        metrics["perf/eval_time"] = time.monotonic() - started
        return metrics

    # ---- weight updates --------------------------------------------------------------------------------------------

    async def endpoints_for_update(self) -> list[EngineEndpoint]:
        return await self.fleet.endpoints_for_update() if self.fleet is not None else []

    async def finish_update(self, version: int, committed: list[int], fenced: list[int]) -> None:
        """Serve from the engines that committed; replace the fenced ones."""
        assert self.fleet is not None
        if committed:
            self.published_version = version
            self.fleet.admit(committed, version)
        await self.fleet.fence(fenced)

    def set_published_version(self, version: int) -> None:
        self.published_version = version

    async def engine_pids(self) -> list[int | None]:
        if self.fleet is None:
            return []
        return [await slot.host.pid() for slot in self.fleet.slots]

    # ---- memory ----------------------------------------------------------------------------------------------------

    async def release_engines(self) -> None:
        """Engines give their device memory to the trainer, and none is started until `resume_engines`."""
        if self.fleet is not None:
            await self.fleet.release_memory()

    async def resume_engines(self, weights_only: bool = False) -> None:
        """Engines take their memory again; with `weights_only` what an update writes to."""
        if self.fleet is not None:
            await self.fleet.resume_memory(weights_only=weights_only)

    # ---- checkpoint ------------------------------------------------------------------------------------------------

    def _remember_data_state(self, rollout_id: int) -> None:
        """Keep what a checkpoint of `rollout_id` must hold, before the next rollout draws: with one-step overlap that
        next rollout is under way when the checkpoint is written, and its prompts must be drawn again on resume."""
        if not self.args.save or rollout_id < 0:
            return
        self._data_states = {k: v for k, v in self._data_states.items() if k >= rollout_id - 1}
        if hasattr(self.data_source, "state_dict"):
            self._data_states[rollout_id] = copy.deepcopy(self.data_source.state_dict())
        else:
            self.data_source.save(rollout_id)
            self._data_states[rollout_id] = None

    async def save(self, rollout_id: int) -> None:
        if rollout_id not in self._data_states:
            await asyncio.to_thread(self.data_source.save, rollout_id)
        elif self._data_states[rollout_id] is not None:
            await asyncio.to_thread(self.data_source.save_state, rollout_id, self._data_states[rollout_id])

    async def load(self, rollout_id: int) -> None:
        await asyncio.to_thread(self.data_source.load, rollout_id)


RemoteRolloutManager: Any = ray.remote(max_restarts=0)(RolloutManager)
