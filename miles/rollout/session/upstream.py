"""The engines as a session server sees them: one generation, whole or as it grows, on the engine that knows the prefix."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
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


class Engines:
    """The run's engines, as the rollout manager tells them with `set`."""

    def __init__(self, *, request_timeout_s: float, recovery_timeout_s: float) -> None:
        limits = SimpleNamespace(engine_start_timeout=recovery_timeout_s, weight_update_timeout=0.0)
        self.pool = EnginePool(limits)
        self._request_timeout_s = request_timeout_s
        self._known: dict[int, EngineClient] = {}

    async def set(self, urls: Mapping[int, str]) -> None:
        """Serve from exactly these engines. One that a request found dead serves again when it is named again."""
        for index, client in list(self._known.items()):
            if urls.get(index) != client.base_url:
                self.pool.set_engine(index, None)
                await self._known.pop(index).close()
        for index, url in urls.items():
            if index not in self._known:
                self._known[index] = EngineClient(url, request_timeout_s=self._request_timeout_s)
            if self.pool.client(index) is None:
                self.pool.set_engine(index, self._known[index])

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
