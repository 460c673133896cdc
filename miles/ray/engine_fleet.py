"""The engines of a run: start, watch, restart, admit to serving."""

from __future__ import annotations

import asyncio
import contextlib
import enum
import json
import logging
import secrets
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import ray

from miles.backends.engine_api.capabilities import Capabilities, probe
from miles.backends.engine_api.client import EngineClient, EngineError
from miles.backends.engine_api.errors import EngineStartError
from miles.backends.engine_api.topology import DECODE, PREFILL, EngineSpec, plan_engines
from miles.ray.engine_hosts import EngineHost, ExternalEngine, LaunchedEngine, external_client
from miles.ray.placement import Placement
from miles.router.engine_pool import EnginePool
from miles.router.prefill_decode import PrefillDecodeClient
from miles.weight_update.types import EngineEndpoint

logger = logging.getLogger(__name__)
# --offload-rollout-level -> the kinds of memory that engines know
_TAGS = {"kv_cache": ("kv_cache", "cuda_graph"), "weight": ("weights",)}
POLL_INTERVAL_S = 0.5
MAX_RESTARTS = 5


class EngineState(enum.Enum):
    STARTING = "starting"
    STALE = "stale"  # alive, but its weights are not the current version: it does not serve
    SERVING = "serving"
    DEAD = "dead"


class CatchUp(enum.Enum):
    """What became of bringing a restarted engine to the current version."""

    CURRENT = "it may serve"
    MUST_WAIT = "nobody holds the published weights any more: it waits for the next update"
    FAILED = "its weights are in doubt: it must be started again"


@dataclass
class EngineSlot:
    spec: EngineSpec
    host: EngineHost
    state: EngineState = EngineState.DEAD
    client: EngineClient | None = None
    capabilities: Capabilities | None = None
    incarnation: int = -1
    released: frozenset[str] = frozenset()  # kinds of memory that it has given back
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)

    @property
    def index(self) -> int:
        return self.spec.index


class EngineFleet:
    """Lives in the rollout manager. An engine serves only while its weights are the current version.

    `catch_up(endpoint)` brings one restarted engine to the current version; it is set once a coordinator exists. Deaths are noticed by polling the processes, and at once by a request that fails.
    """

    def __init__(self, args: Any, placement: Placement | None, pool: EnginePool) -> None:
        self.args, self.placement, self.pool = args, placement, pool
        self.admin_key = secrets.token_hex(16)  # only this run can control its engines
        self.slots: list[EngineSlot] = []
        self.catch_up: Callable[[EngineEndpoint], Awaitable[CatchUp]] | None = None
        self.version = 0
        self._watcher: asyncio.Task | None = None
        self._recoveries: dict[int, asyncio.Task] = {}
        self._catch_ups: set[asyncio.Task] = set()
        # Requests for the model that is trained go to `pool`; each other model has a pool of its own.
        self.pools: dict[str, EnginePool] = {}
        self._have_devices = asyncio.Event()  # unset while the trainer has them
        self._have_devices.set()
        pool.on_dead = self.report_dead

    @property
    def restarts(self) -> int:
        """Engine processes that had to be started again in this run."""
        return sum(max(slot.incarnation, 0) for slot in self.slots)

    # ---- life ------------------------------------------------------------------------------------------------------

    async def start(self, version: int) -> None:
        self.version = version
        self.slots = [EngineSlot(spec, self._host_of(spec)) for spec in plan_engines(self.args)]
        for slot in self.slots:
            self.pools[slot.spec.model] = self._pool_of(slot.spec)
        await _gather_all([self._launch(slot) for slot in self.slots])
        self._watcher = asyncio.create_task(self._watch(), name="engine-watch")

    def _host_of(self, spec: EngineSpec) -> EngineHost:
        if spec.address is not None:
            return ExternalEngine(self.args, spec)
        assert self.placement is not None
        return LaunchedEngine(self.args, spec, self.admin_key, self.placement)

    def _pool_of(self, spec: EngineSpec) -> EnginePool:
        if spec.trained:
            return self.pool
        pool = self.pools.get(spec.model) or EnginePool(self.args)
        pool.on_dead = self.report_dead
        return pool

    async def _launch(self, slot: EngineSlot) -> None:
        """Start the slot's server; afterwards it is alive and STALE, or serves if its model is not trained."""
        await self._have_devices.wait()
        slot.state, slot.incarnation, slot.released = EngineState.STARTING, slot.incarnation + 1, frozenset()
        try:
            url = await slot.host.start(slot.incarnation, self.version)
        except Exception as error:
            slot.state = EngineState.DEAD
            raise EngineStartError(f"engine {slot.index} did not start: {error}") from error
        slot.client = self._client(slot, url)
        try:
            slot.capabilities = await probe(slot.client)
            slot.client.dp_ranks = slot.capabilities.dp_ranks
        except EngineError as error:
            slot.state = EngineState.DEAD
            raise EngineStartError(f"engine {slot.index} cannot be used: {error}") from error
        if slot.spec.address is None and self.args.offload_rollout and not slot.capabilities.memory_release:
            slot.state = EngineState.DEAD
            raise EngineStartError(
                f"engine {slot.index} ({slot.capabilities.server} {slot.capabilities.version}) does not release memory: "
                "set --no-offload-rollout"
            )
        slot.state = EngineState.STALE
        logger.info("engine %d (%s, incarnation %d) is up at %s", slot.index, slot.spec, slot.incarnation, url)
        if not slot.spec.trained:
            self.admit([slot.index])

    def _client(self, slot: EngineSlot, url: str) -> EngineClient:
        model = slot.spec.model_path or self.args.hf_checkpoint
        options = {"request_timeout_s": self.args.rollout_request_timeout, "vocab_size": vocabulary(model)}
        if slot.spec.address is not None:
            return external_client(self.args, url, **options)
        return EngineClient(url, admin_key=self.admin_key, **options)

    def _serve(self, slot: EngineSlot) -> None:
        """Let the pool of the slot's model know what serves now: of a disaggregated model pairs, so both must be there."""
        pool = self.pools[slot.spec.model]
        if slot.spec.kind not in (PREFILL, DECODE):
            pool.set_engine(slot.index, slot.client if slot.state is EngineState.SERVING else None)
            return
        mine = [s for s in self.slots if s.spec.model == slot.spec.model and s.state is EngineState.SERVING]
        prefills = [s.client for s in mine if s.spec.kind == PREFILL and s.client is not None]
        for other in self.slots:
            if other.spec.model == slot.spec.model and other.spec.kind == DECODE:
                ready = other in mine and other.client is not None and prefills
                pool.set_engine(other.index, PrefillDecodeClient(other.client, prefills) if ready else None)  # type: ignore[arg-type]

    def model_addresses(self) -> dict[str, tuple[str, int]]:
        """Host and port of each model's first engine, for hooks that send requests by themselves."""
        found: dict[str, tuple[str, int]] = {}
        for slot in self.slots:
            if slot.client is not None and slot.spec.kind != PREFILL:
                parts = urlsplit(slot.client.base_url)
                found.setdefault(slot.spec.model, (parts.hostname or "", parts.port or 80))
        return found

    async def stop(self) -> None:
        tasks = [self._watcher, *self._recoveries.values(), *self._catch_ups]
        for task in tasks:
            if task is not None:
                task.cancel()
        await asyncio.gather(*(t for t in tasks if t is not None), return_exceptions=True)
        await asyncio.gather(*(self._shut(slot) for slot in self.slots), return_exceptions=True)

    async def _shut(self, slot: EngineSlot) -> None:
        client, slot.client, slot.state = slot.client, None, EngineState.DEAD
        self._serve(slot)
        if client is not None:
            await client.close()
        await slot.host.stop()

    # ---- watching and recovery -------------------------------------------------------------------------------------

    async def _watch(self) -> None:
        last_probe = time.monotonic()
        while True:
            await asyncio.sleep(POLL_INTERVAL_S)
            probe = self.args.use_fault_tolerance and (
                time.monotonic() - last_probe >= self.args.rollout_health_check_interval
            )
            last_probe = time.monotonic() if probe else last_probe
            alive = [s for s in self.slots if s.state in (EngineState.STALE, EngineState.SERVING)]
            await asyncio.gather(*(self._check(slot, probe) for slot in alive))

    async def _check(self, slot: EngineSlot, probe: bool) -> None:
        incarnation = slot.incarnation
        try:
            why = await slot.host.poll()
            if why is None and probe and slot.client is not None:
                await slot.client.alive(timeout_s=self.args.rollout_health_check_timeout)
        except (EngineError, TimeoutError) as error:
            why = f"no healthy answer: {type(error).__name__}: {error}"
        if why is not None and slot.incarnation == incarnation:
            self.report_dead(slot.index, why)

    def report_dead(self, index: int, why: str = "a request found it unreachable") -> None:
        """Take an engine out of service and begin to replace it; further reports of the same death do nothing."""
        slot = self.slots[index]
        if slot.state not in (EngineState.STALE, EngineState.SERVING) or index in self._recoveries:
            return
        logger.error("engine %d (incarnation %d) is dead: %s", index, slot.incarnation, why)
        slot.state = EngineState.DEAD
        self._serve(slot)
        task = asyncio.create_task(self._replace(slot, why), name=f"replace-engine-{index}")
        self._recoveries[index] = task
        task.add_done_callback(lambda _: self._recovered(index))

    def _recovered(self, index: int) -> None:
        """A replacement is up (or given up). Catching it up is not part of its recovery: an update in progress waits
        for recoveries, and the catch-up would wait for that update."""
        self._recoveries.pop(index, None)
        task = asyncio.create_task(self.refresh(index), name=f"catch-up-engine-{index}")
        self._catch_ups.add(task)
        task.add_done_callback(self._catch_ups.discard)

    async def _replace(self, slot: EngineSlot, why: str) -> None:
        async with slot.lock:
            if self.restarts >= MAX_RESTARTS * len(self.slots):
                message = f"engines died {self.restarts} times in this run; last: engine {slot.index}, {why}"
                self.pools[slot.spec.model].fail(EngineStartError(message))
                return
            with contextlib.suppress(ray.exceptions.RayError):
                logger.error("engine %d's last lines:\n%s", slot.index, await slot.host.last_lines())
            try:
                await self._shut(slot)
                await self._launch(slot)
            except Exception as error:
                logger.exception("engine %d could not be restarted", slot.index)
                failure = EngineStartError(f"engine {slot.index} died ({why}) and its restart failed: {error}")
                self.pools[slot.spec.model].fail(failure)

    async def refresh(self, index: int) -> None:
        """Bring a stale engine to the current version and let it serve; without a way to, it waits for an update."""
        slot = self.slots[index]
        if slot.state is not EngineState.STALE:
            return
        if self.catch_up is None or self.version == 0:
            if self.version == 0 and self.args.debug_rollout_only:
                self.admit([index])
            return
        incarnation = slot.incarnation
        result = await self.catch_up(self.endpoint(slot))
        if slot.incarnation != incarnation:
            return
        if result is CatchUp.CURRENT:
            self.admit([index])
        elif result is CatchUp.FAILED:
            self.report_dead(index, "it could not be brought to the current version")

    # ---- memory ----------------------------------------------------------------------------------------------------

    async def release_memory(self) -> None:
        """Every engine gives back what `--offload-rollout-level` names. One that cannot is replaced in the engines' next turn."""
        self._have_devices.clear()
        wanted = [tag for level in self.args.offload_rollout_level for tag in _TAGS[level]]

        async def release(slot: EngineSlot, client: EngineClient) -> None:
            # Weights come back by an update, and of other models there is none.
            tags = [tag for tag in wanted if slot.spec.trained or tag != "weights"]
            if slot.spec.address is not None or not tags:
                return  # it runs elsewhere
            await client.flush()  # an SGLang that is told to release while requests are queued ends itself
            await client.release_memory(tags)
            slot.released = frozenset(tags)

        await self._on_live("could not release its memory", release)

    async def resume_memory(self, *, weights_only: bool) -> None:
        """Engines take again what they gave back; with `weights_only` the weights alone."""
        self._have_devices.set()

        async def resume(slot: EngineSlot, client: EngineClient) -> None:
            tags = slot.released & {"weights"} if weights_only else slot.released
            if tags:
                await client.resume_memory(sorted(tags))
                slot.released -= tags

        await self._on_live("could not resume its memory", resume)

    async def _on_live(self, trouble: str, step: Callable[[EngineSlot, EngineClient], Awaitable[None]]) -> None:
        async def on(slot: EngineSlot, client: EngineClient) -> None:
            try:
                await step(slot, client)
            except EngineError as error:
                self.report_dead(slot.index, f"{trouble}: {error}")

        live = (EngineState.STALE, EngineState.SERVING)
        await asyncio.gather(*(on(s, s.client) for s in self.slots if s.state in live and s.client is not None))

    # ---- weight updates --------------------------------------------------------------------------------------------

    def endpoint(self, slot: EngineSlot) -> EngineEndpoint:
        assert slot.client is not None and slot.capabilities is not None
        return EngineEndpoint(
            index=slot.index,
            url=slot.client.base_url,
            admin_key=slot.client.admin_key or "",
            world_size=slot.host.world_size,
            incarnation=slot.incarnation,
            digests=slot.capabilities.digests,
        )

    async def endpoints_for_update(self) -> list[EngineEndpoint]:
        """All engines, after those that are being replaced have come up. Raises if one cannot."""
        pending = list(self._recoveries.values())
        if pending:
            await asyncio.wait(pending, timeout=self.args.engine_start_timeout)
        dead = [slot for slot in self.slots if slot.state is EngineState.DEAD]
        await _gather_all([self._launch(slot) for slot in dead])
        return [self.endpoint(slot) for slot in self.slots if slot.client is not None and slot.spec.trained]

    def admit(self, indices: list[int], version: int | None = None) -> None:
        """Let engines whose weights were verified serve."""
        if version is not None:
            self.version = version
        for index in indices:
            slot = self.slots[index]
            if slot.client is not None and slot.state in (EngineState.STALE, EngineState.SERVING):
                slot.state = EngineState.SERVING
                self._serve(slot)

    async def fence(self, indices: list[int]) -> None:
        """Kill engines whose weights are in doubt, and start them again; they serve after the next update."""
        for index in indices:
            self.slots[index].state = EngineState.DEAD
            self._serve(self.slots[index])

        async def again(slot: EngineSlot) -> None:
            async with slot.lock:
                await self._shut(slot)
                await self._launch(slot)

        await _gather_all([again(self.slots[i]) for i in indices])


def vocabulary(model_path: str) -> int | None:
    """Rows of the model's embedding table; None where its config does not say. An id beyond ends an SGLang server."""
    try:
        config = json.loads((Path(model_path) / "config.json").read_text())
    except (OSError, ValueError):
        return None
    return config.get("vocab_size") or config.get("text_config", {}).get("vocab_size")


async def _gather_all(coroutines: list) -> None:
    """Wait for all; then raise the first error, with the number of others."""
    results = await asyncio.gather(*coroutines, return_exceptions=True)
    errors = [r for r in results if isinstance(r, BaseException)]
    if errors:
        raise errors[0]
