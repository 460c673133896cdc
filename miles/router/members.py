"""The engines that a process beside the rollout manager routes over: it is told which serve, and watches them by itself."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from types import SimpleNamespace

from miles.backends.engine_api.client import EngineClient
from miles.backends.engine_api.errors import EngineError
from miles.router.engine_pool import EnginePool

logger = logging.getLogger(__name__)

_PROBE_TIMEOUT_S = 5.0


@dataclass(frozen=True)
class EngineAddress:
    """Where an engine is, and how many data-parallel ranks it has."""

    url: str
    dp_ranks: int = 1


class Members:
    """A pool over the engines named with `set`. One that does not answer leaves it, and returns when it answers again.

    Args:
        key: that engines want with a generation (`--sglang-api-key`); None where they want none.
        max_connections: to one engine; 0 for any number.
    """

    def __init__(
        self, *, request_timeout_s: float, recovery_timeout_s: float, key: str | None = None, max_connections: int = 0
    ) -> None:
        limits = SimpleNamespace(engine_start_timeout=recovery_timeout_s, weight_update_timeout=0.0)
        self.pool = EnginePool(limits)
        self._request_timeout_s, self._key, self._max_connections = request_timeout_s, key, max_connections
        self._known: dict[int, tuple[EngineAddress, EngineClient]] = {}
        self._failures: Counter[int] = Counter()

    @property
    def addresses(self) -> dict[int, EngineAddress]:
        """Every engine that was named, whether it serves now or not."""
        return {index: address for index, (address, _) in self._known.items()}

    async def set(self, engines: Mapping[int, EngineAddress]) -> None:
        """Serve from exactly these engines. One that a request found dead serves again when it is named again."""
        for index, (address, client) in list(self._known.items()):
            if engines.get(index) != address:
                self.pool.set_engine(index, None)
                del self._known[index], self._failures[index]
                await client.close()
        for index, address in engines.items():
            if index not in self._known:
                self._known[index] = address, self._client(address)
            if self.pool.client(index) is None and not self._failures[index]:
                self.pool.set_engine(index, self._known[index][1])

    def _client(self, address: EngineAddress) -> EngineClient:
        return EngineClient(
            address.url,
            api_key=self._key,
            request_timeout_s=self._request_timeout_s,
            dp_ranks=address.dp_ranks,
            max_connections=self._max_connections,
        )

    async def probe(self, threshold: int) -> None:
        """Ask every engine whether it lives: `threshold` times without an answer take it out, one answer brings it back."""
        await asyncio.gather(*(self._probe(i, client, threshold) for i, (_, client) in self._known.items()))

    async def _probe(self, index: int, client: EngineClient, threshold: int) -> None:
        try:
            await client.alive(timeout_s=_PROBE_TIMEOUT_S)
        except EngineError as error:
            self._failures[index] += 1
            if self._failures[index] >= threshold and self.pool.client(index) is client:
                logger.warning("engine %d is out after %d checks: %s", index, self._failures[index], error)
                self.pool.set_engine(index, None)
            return
        if index not in self._known or self._known[index][1] is not client:
            return  # it was replaced meanwhile
        del self._failures[index]
        if self.pool.client(index) is None:
            logger.warning("engine %d answers again", index)
            self.pool.set_engine(index, client)

    async def close(self) -> None:
        await self.set({})
