"""`--use-miles-router`: one process routes for everybody, so that all who send requests share one view of load and affinity.

To whoever sends requests, the router is the only engine: same calls, same answers.
"""

from __future__ import annotations

import secrets
from collections.abc import AsyncIterator
from typing import Any

from miles.backends.engine_api.client import EngineClient
from miles.backends.engine_api.errors import EngineFailed
from miles.router.app import RouterConfig
from miles.router.engine_pool import EnginePool, NoEngineError
from miles.router.servers import PoolServers

_UNAVAILABLE = 503


class RouterClient(EngineClient):
    """The router as an engine. What it has waited for in vain is not waited for again."""

    async def generate(
        self, payload: dict[str, Any], *, timeout_s: float | None = None, routing_key: str | None = None
    ) -> Any:
        try:
            return await super().generate(payload, timeout_s=timeout_s, routing_key=routing_key)
        except EngineFailed as error:
            raise _as_told(error) from error

    async def generate_stream(
        self, payload: dict[str, Any], *, timeout_s: float | None = None, routing_key: str | None = None
    ) -> AsyncIterator[dict[str, Any]]:
        try:
            async for chunk in super().generate_stream(payload, timeout_s=timeout_s, routing_key=routing_key):
                yield chunk
        except EngineFailed as error:
            raise _as_told(error) from error


def _as_told(error: EngineFailed) -> Exception:
    return NoEngineError(str(error)) if error.status == _UNAVAILABLE else error


class MilesRouter(PoolServers):
    """The router process of a run, and `front`, the pool of those who send requests: the router is its only engine.

    Args:
        pool: the run's engines.
    """

    def __init__(self, args: Any, pool: EnginePool, host: str) -> None:
        key = secrets.token_hex(16)
        super().__init__(args, pool, host, title="router", module="miles.router.serve", key=key)
        timeout = args.miles_router_timeout or args.rollout_request_timeout
        self._config = RouterConfig(
            key=key,
            engine_key=args.sglang_api_key,
            request_timeout_s=timeout,
            recovery_timeout_s=pool.recovery_timeout_s,
            health_interval_s=args.rollout_health_check_interval,
            health_failures=args.miles_router_health_check_failure_threshold,
            max_connections=args.miles_router_max_connections or 0,
        )
        self.front = EnginePool(args)
        self._client: RouterClient | None = None

    async def start(self) -> None:
        """Raises: ServerStartError with the log of a router that does not start."""
        server = self.launch("router", 0, self._config)
        await super().start()
        self.args.sglang_router_ip, self.args.sglang_router_port = self.host, server.port
        # The router tries again by itself; whoever waits for it waits longer than it does.
        patience = self._config.request_timeout_s + self._config.recovery_timeout_s
        self._client = RouterClient(
            f"http://{self.host}:{server.port}", admin_key=self._config.key, request_timeout_s=patience
        )
        self.front.on_dead = lambda index: self._changed.set()
        self.pool.on_failure = self.front.fail
        self.front.set_engine(0, self._client)

    async def _look_after(self, server: Any) -> None:
        await super()._look_after(server)
        if self.front.client(0) is None and self._client is not None:
            self.front.set_engine(0, self._client)

    async def stop(self) -> None:
        if self._client is not None:
            await self._client.close()
        await super().stop()
