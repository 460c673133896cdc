"""The weight version, and the transaction that moves it."""

from __future__ import annotations

import asyncio
import logging
import time
from typing import Any

import ray

from miles.ray.engine_fleet import CatchUp
from miles.utils.process_logging import redirect_to_log
from miles.weight_update.types import EngineEndpoint, TransferReport

logger = logging.getLogger(__name__)
ATTEMPTS = 2


class WeightUpdateError(RuntimeError):
    """No attempt to bring the engines to the trainer's weights succeeded."""


class WeightUpdateCoordinator:
    """Owns the run's one weight version: 0 before the first update, then one more with each commit."""

    def __init__(self, args: Any, manager: Any, trainers: list[Any], version: int) -> None:
        redirect_to_log(args.run_dir, "coordinator")
        self.args, self.manager, self.trainers, self.version = args, manager, trainers, version
        self._lock = asyncio.Lock()  # an update and a catch-up never overlap
        self._current: dict[int, int] = {}  # incarnation of each engine that serves the current version
        self._preflight_due = bool(args.check_weight_update_equal)

    async def current_version(self) -> int:
        return self.version

    async def update(self) -> dict[str, float]:
        """Bring every engine to the trainer's weights as version + 1. Returns metrics.

        An attempt that fails leaves the version as it was and replaces every engine whose weights are in doubt; one
        more attempt follows with the replacements. Raises WeightUpdateError after the last.
        """
        async with self._lock:
            failures: list[str] = []
            for attempt in range(ATTEMPTS):
                started = time.monotonic()
                engines = await self.manager.endpoints_for_update.remote()
                outcome = await self._attempt(self.version + 1, engines)
                await self.manager.finish_update.remote(
                    self.version + 1, sorted(outcome.committed), sorted(outcome.fenced)
                )
                if outcome.succeeded:
                    self.version += 1
                    self._current = {e.index: e.incarnation for e in engines if e.index in outcome.committed}
                    self._preflight_due = False
                    return outcome.metrics() | {
                        "perf/update_weights_time": time.monotonic() - started,
                        "perf/update_weights_attempts": float(attempt + 1),
                        "rollout/weight_version/published": float(self.version),
                    }
                failures.append(str(outcome.error))
                logger.error("update to version %d, attempt %d: %s", self.version + 1, attempt + 1, outcome.error)
            raise WeightUpdateError(
                f"the weights of version {self.version + 1} did not reach the engines in {ATTEMPTS} attempts; "
                "the last checkpoint is intact. Failures: " + " | ".join(failures)
            )

    async def _attempt(self, version: int, engines: list[EngineEndpoint]) -> Any:
        from miles.weight_update.preflight import check_weight_update_equal
        from miles.weight_update.transaction import run_update

        async def transfer() -> TransferReport:
            return await self._on_all_ranks("transfer_weights", version, engines)

        run = check_weight_update_equal if self._preflight_due else run_update
        return await run(self.args, version, engines, transfer)

    async def _on_all_ranks(self, method: str, version: int, engines: list[EngineEndpoint]) -> TransferReport:
        reports = await asyncio.gather(*(getattr(t, method).remote(version, engines) for t in self.trainers))
        sent = [report for report in reports if report is not None]
        if len(sent) != 1:
            raise WeightUpdateError(f"{len(sent)} trainer ranks reported a transfer; expected exactly one source")
        return sent[0]

    async def bring_current(self, engine: EngineEndpoint) -> CatchUp:
        """Give one restarted engine the weights of the current version, from the copy that the source rank keeps.

        The copy alone is used: gathering the model takes every rank, and a train step may be on its way to some of them.
        """
        from miles.weight_update.transaction import run_update
        from miles.weight_update.updater import merge_reports

        async with self._lock:
            if self._current.get(engine.index) == engine.incarnation:
                return CatchUp.CURRENT  # an update came first
            if not self.args.keep_published_weights or not self._current:
                return CatchUp.MUST_WAIT

            async def transfer() -> TransferReport:
                resent = [trainer.resend_weights.remote(self.version, [engine]) for trainer in self.trainers]
                return merge_reports([report for report in await asyncio.gather(*resent) if report is not None])

            outcome = await run_update(self.args, self.version, [engine], transfer)
            if outcome.succeeded:
                self._current[engine.index] = engine.incarnation
            return CatchUp.CURRENT if outcome.succeeded else CatchUp.FAILED


RemoteWeightUpdateCoordinator: Any = ray.remote(max_restarts=0)(WeightUpdateCoordinator)
