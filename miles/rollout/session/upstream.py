"""The engines as a session server sees them: one generation, whole or as it grows, on the engine that knows the prefix."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any, Protocol

from miles.backends.engine_api.errors import EngineError, EngineRejected
from miles.rollout.session.errors import EngineUnavailable, RequestRefused
from miles.router.members import Members


class Upstream(Protocol):
    """`payload` is a body of `/generate`; `key` keeps calls with the same prefix together.

    Raises: SessionError.
    """

    async def generate(self, payload: dict[str, Any], key: str) -> dict[str, Any]: ...

    def stream(self, payload: dict[str, Any], key: str) -> AsyncIterator[dict[str, Any]]: ...


class Engines(Members):
    """The run's engines, or its router in their place, as the rollout manager tells them."""

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
