"""The engines as a session server sees them: one generation, whole or as it grows, on the engine that knows the prefix."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, Protocol

from miles.backends.engine_api.client import EngineClient
from miles.backends.engine_api.errors import EngineError, EngineRejected
from miles.rollout.session.errors import EngineUnavailable, RequestRefused
from miles.router.engine_pool import EnginePool


class Upstream(Protocol):
    """`payload` is a body of `/generate`; `key` keeps calls with the same prefix together.

    Raises: SessionError.
    """

    async def generate(self, payload: dict[str, Any], key: str) -> dict[str, Any]: ...

    def stream(self, payload: dict[str, Any], key: str) -> AsyncIterator[dict[str, Any]]: ...


@dataclass(frozen=True)
class EngineAddress:
    """Where an engine is, and how many data-parallel ranks it has."""

    url: str
    dp_ranks: int = 1


class Engines:
    """The run's engines, as the rollout manager tells them with `set`.

    Args:
        key: that engines want with a generation (`--sglang-api-key`); None where they want none.
    """

    def __init__(self, *, request_timeout_s: float, recovery_timeout_s: float, key: str | None = None) -> None:
        limits = SimpleNamespace(engine_start_timeout=recovery_timeout_s, weight_update_timeout=0.0)
        self.pool = EnginePool(limits)
        self._request_timeout_s, self._key = request_timeout_s, key
        self._known: dict[int, tuple[EngineAddress, EngineClient]] = {}

    async def set(self, engines: Mapping[int, EngineAddress]) -> None:
        """Serve from exactly these engines. One that a request found dead serves again when it is named again."""
        for index, (address, client) in list(self._known.items()):
            if engines.get(index) != address:
                self.pool.set_engine(index, None)
                del self._known[index]
                await client.close()
        for index, address in engines.items():
            if index not in self._known:
                self._known[index] = address, self._client(address)
            if self.pool.client(index) is None:
                self.pool.set_engine(index, self._known[index][1])

    def _client(self, address: EngineAddress) -> EngineClient:
        return EngineClient(
            address.url, api_key=self._key, request_timeout_s=self._request_timeout_s, dp_ranks=address.dp_ranks
        )

    async def close(self) -> None:
        await self.set({})

    async def generate(self, payload: dict[str, Any], key: str) -> dict[str, Any]:
        try:
            return await self.pool.generate(payload, key)
        except EngineError as error:
            raise _as_session_error(error) from error

    async def stream(self, payload: dict[str, Any], key: str) -> AsyncIterator[dict[str, Any]]:
        try:
            async for chunk in self.pool.generate_stream(payload, key):
                yield chunk
        except EngineError as error:
            raise _as_session_error(error) from error


def _as_session_error(error: EngineError) -> Exception:
    if isinstance(error, EngineRejected):
        return RequestRefused(f"the engine refused the request: {error}")
    return EngineUnavailable(f"no engine could answer: {error}")
