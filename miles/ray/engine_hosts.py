"""What stands behind one engine of the fleet: actors that run its server, or a server that ran already."""

from __future__ import annotations

import asyncio
import logging
import time
from typing import Any, Protocol

import ray

from miles.backends.engine_api.adoption import adopt
from miles.backends.engine_api.client import EngineClient, EngineError
from miles.backends.engine_api.errors import EngineStartError, EngineUnreachable
from miles.backends.engine_api.topology import EngineSpec, engine_args
from miles.ray.placement import Placement
from miles.ray.rollout_engine import RemoteRolloutEngine

logger = logging.getLogger(__name__)
_STOP_TIMEOUT_S = 15.0
_ADOPTION_RETRY_S = 0.5
_MISSED_ANSWERS = 3
_LOOK_S = 1.0


class EngineHost(Protocol):
    """Starts, watches and ends one engine. `world_size` (ranks that join a weight group) is known after `start`."""

    world_size: int

    async def start(self, incarnation: int, version: int) -> str:
        """The engine's url once it answers. Raises EngineStartError with its last lines."""
        ...

    async def poll(self) -> str | None:
        """Why the engine is dead; None while it lives."""
        ...

    async def last_lines(self) -> str: ...

    async def pid(self) -> int | None: ...

    async def stop(self) -> None:
        """End the engine, or let go of it."""
        ...


class LaunchedEngine:
    """One actor on each node that the engine spans; the first runs the server that is addressed."""

    def __init__(self, args: Any, spec: EngineSpec, admin_key: str, placement: Placement) -> None:
        self.args, self.spec, self.admin_key, self.placement = args, spec, admin_key, placement
        self.world_size = spec.devices
        self._actors = [self._create(rank) for rank in range(spec.nodes)]

    def _create(self, node_rank: int) -> Any:
        spec, demand = self.spec, self.placement.demand
        first = demand.rollout_offset + spec.offset + node_rank * spec.devices_per_node
        share = 0.2 if self.args.colocate or self.args.train_device == "cuda" else 1.0
        gpus = None
        if spec.devices > 1 and demand.gpus:
            gpus = self.placement.gpu_ids(range(first, first + spec.devices_per_node))
        options = self.placement.actor_options(first, share)
        own = engine_args(self.args, spec)
        return RemoteRolloutEngine.options(**options).remote(own, spec.index, self.admin_key, node_rank, gpus)

    async def start(self, incarnation: int, version: int) -> str:
        try:
            return await self._start(incarnation, version)
        except ray.exceptions.RayActorError:
            await self._replace_actors()
            return await self._start(incarnation, version)

    async def _start(self, incarnation: int, version: int) -> str:
        meeting = None
        if self.spec.nodes > 1:
            meeting = await self._actors[0].reserve_meeting.remote()
        starting: list[asyncio.Future] = [
            asyncio.ensure_future(_future(actor.start.remote(incarnation, version, meeting))) for actor in self._actors
        ]
        lost: asyncio.Future = asyncio.ensure_future(self._first_lost())
        ready: asyncio.Future = asyncio.gather(*starting)
        try:
            await asyncio.wait({ready, lost}, return_when=asyncio.FIRST_COMPLETED)
            if not ready.done():
                lost.result()  # raises
            return (await ready)[0]
        finally:
            for task in (lost, *starting):
                task.cancel()

    async def _first_lost(self) -> None:
        """Raises when a further node's part ends while the first waits for it; never returns."""
        while True:
            await asyncio.sleep(_LOOK_S)
            for rank, actor in list(enumerate(self._actors))[1:]:
                code = await actor.poll.remote()
                if code not in (None, -1):  # -1: not started yet
                    lines = await actor.last_lines.remote()
                    raise EngineStartError(f"node rank {rank} of the engine ended with exit code {code}:\n{lines}")

    async def poll(self) -> str | None:
        try:
            codes = await asyncio.gather(*(_future(actor.poll.remote()) for actor in self._actors))
        except ray.exceptions.RayError as error:
            return f"its actor does not answer: {type(error).__name__}: {error}"
        ended = [(rank, code) for rank, code in enumerate(codes) if code is not None]
        if not ended:
            return None
        where = f" (node rank {ended[0][0]})" if self.spec.nodes > 1 else ""
        return f"exit code {ended[0][1]}{where}"

    async def last_lines(self) -> str:
        return "\n".join(await asyncio.gather(*(_future(actor.last_lines.remote()) for actor in self._actors)))

    async def pid(self) -> int | None:
        return await self._actors[0].pid.remote()

    async def stop(self) -> None:
        stopping = asyncio.gather(*(_future(actor.stop.remote()) for actor in self._actors))
        try:
            await asyncio.wait_for(stopping, _STOP_TIMEOUT_S)
        except (TimeoutError, ray.exceptions.RayError) as error:
            logger.warning("engine %d could not be stopped in order: %s; killing its actor", self.spec.index, error)
            await self._replace_actors()

    async def _replace_actors(self) -> None:
        for actor in self._actors:
            ray.kill(actor)
        self._actors = [self._create(rank) for rank in range(self.spec.nodes)]


class ExternalEngine:
    """A server that somebody else runs. It is asked, updated and paused like the others, and never ended."""

    def __init__(self, args: Any, spec: EngineSpec) -> None:
        assert spec.address is not None
        self.args, self.url = args, spec.address
        self.world_size = 1
        self._client = external_client(args, self.url)
        self._missed = 0

    async def start(self, incarnation: int, version: int) -> str:
        """Adopt it; one that was lost is waited for. A server that cannot serve this run is refused at once."""
        deadline = time.monotonic() + self.args.engine_start_timeout
        while True:
            try:
                self.world_size = await adopt(self._client, self.args.hf_checkpoint, resume=incarnation == 0)
                if self.world_size > 1 and self.args.verify_weight_update:
                    raise EngineStartError(
                        f"the weights of the external engine at {self.url}, of {self.world_size} ranks, cannot be "
                        "verified by digest yet: set --no-verify-weight-update"
                    )
                self._missed = 0
                return self.url
            except EngineStartError:
                raise
            except EngineError as error:
                # At the start of a run an address without a server is a mistake, not a server that comes back.
                if incarnation == 0 or time.monotonic() >= deadline:
                    raise EngineStartError(
                        f"the external engine at {self.url} cannot be adopted (--rollout-external-engine-addrs): {error}"
                    ) from error
            await asyncio.sleep(_ADOPTION_RETRY_S)

    async def poll(self) -> str | None:
        try:
            await self._client.alive(timeout_s=self.args.rollout_health_check_timeout)
            self._missed = 0
        except EngineUnreachable as error:
            return str(error)
        except EngineError as error:
            self._missed += 1
            if self._missed >= _MISSED_ANSWERS:
                return f"{_MISSED_ANSWERS} times in a row: {error}"
        return None

    async def last_lines(self) -> str:
        return f"(the log of {self.url} is where its owner has it)"

    async def pid(self) -> int | None:
        return None

    async def stop(self) -> None:
        """Let go. A server that was paused by us stays so only if its weights are in doubt, until it is adopted again."""


def external_client(args: Any, url: str, **options: Any) -> EngineClient:
    """A client with the keys that the server's owner gave (--sglang-api-key, --sglang-admin-api-key)."""
    key = args.sglang_api_key
    return EngineClient(url, admin_key=args.sglang_admin_api_key or key, api_key=key, **options)


async def _future(ref: Any) -> Any:
    return await ref
