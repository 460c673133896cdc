"""One HTTP exchange with an engine: a session, a deadline, typed errors, capped retries."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import aiohttp
import orjson

from miles.backends.engine_api.errors import EngineFailed, EngineRejected, EngineTimeout, EngineUnreachable

_CONNECT_TIMEOUT_S = 10.0
# Below the 5 s after which uvicorn, which both engines use, closes an idle connection: otherwise a call may be sent into
# a connection that is being closed, and would look like a dead engine.
_KEEPALIVE_S = 3.0
_RETRY_DELAY_S = 0.1


class HttpTransport:
    """Keep-alive JSON calls to one base url. Make it anywhere; use and close it in one event loop."""

    def __init__(
        self,
        base_url: str,
        *,
        admin_key: str | None,
        api_key: str | None = None,
        retries: int,
        max_connections: int = 0,
    ) -> None:
        self.base_url, self._max_connections = base_url.rstrip("/"), max_connections
        self.admin_key, self._api_key, self._retries = admin_key, api_key, retries
        self._session: aiohttp.ClientSession | None = None
        self._closed = False

    async def close(self) -> None:
        """Calls in progress, and any later ones, raise EngineUnreachable."""
        self._closed = True
        session, self._session = self._session, None
        if session is not None:
            await session.close()

    def open_session(self) -> aiohttp.ClientSession:
        if self._closed:
            raise EngineUnreachable(
                f"{self.base_url}: this client was closed, because the engine is stopped or replaced"
            )
        if self._session is None:
            self._session = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(limit=self._max_connections, keepalive_timeout=_KEEPALIVE_S),
                timeout=aiohttp.ClientTimeout(total=None, sock_connect=_CONNECT_TIMEOUT_S),
                read_bufsize=1 << 20,
            )
        return self._session

    async def call(
        self,
        method: str,
        path: str,
        body: Any = None,
        *,
        timeout_s: float,
        admin: bool = True,
        idempotent: bool = False,
        headers: Mapping[str, str] = MappingProxyType({}),
    ) -> Any:
        """The decoded answer (text where it is not JSON, None where it is empty).

        `timeout_s` covers all attempts. Only idempotent calls are tried again, and only after a lost connection or a 5xx.
        """
        what = f"{self.base_url}{path.partition('?')[0]}"
        attempts = 1 + (self._retries if idempotent else 0)
        try:
            async with asyncio.timeout(timeout_s):
                for attempt in range(attempts):
                    try:
                        return await self._once(method, path, body, self.headers(admin) | dict(headers), what)
                    except (EngineUnreachable, EngineFailed):
                        if attempt + 1 == attempts:
                            raise
                        await asyncio.sleep(_RETRY_DELAY_S * 2**attempt)
        except TimeoutError:
            raise EngineTimeout(f"{what} did not answer within {timeout_s:g} s") from None

    async def _once(self, method: str, path: str, body: Any, headers: dict[str, str], what: str) -> Any:
        data = None if body is None else orjson.dumps(body, option=orjson.OPT_SERIALIZE_NUMPY)
        try:
            async with self.open_session().request(method, self.base_url + path, data=data, headers=headers) as reply:
                content = await reply.read()
                status, is_json = reply.status, "json" in reply.headers.get("Content-Type", "")
        except (aiohttp.ClientConnectionError, aiohttp.ClientPayloadError, ConnectionError) as error:
            raise EngineUnreachable(f"{what}: connection lost: {type(error).__name__}: {error}") from error
        answer = decode(content, is_json, status, what)
        check(answer, status, what)
        return answer

    def headers(self, admin: bool) -> dict[str, str]:
        headers = {"Content-Type": "application/json"}
        if key := self.admin_key if admin else self._api_key:
            headers["Authorization"] = f"Bearer {key}"
        return headers


def decode(content: bytes, is_json: bool, status: int, what: str) -> Any:
    if not content:
        return None
    try:
        return orjson.loads(content)
    except orjson.JSONDecodeError:
        if is_json and status == 200:
            raise EngineFailed(f"{what} answered with broken JSON: {content[:200]!r}", status) from None
        return content.decode(errors="replace")


def check(answer: Any, status: int, what: str) -> None:
    """Raise what an answer that is no success means."""
    if status == 401 or status == 403:
        raise EngineRejected(
            f"{what} refused this run's key ({status}): the server at this address belongs to another run", status
        )
    if status >= 500:
        raise EngineFailed(f"{what} failed with {status}: {message_of(answer)}", status)
    if status >= 300:
        raise EngineRejected(f"{what} refused the call with {status}: {message_of(answer)}", status)
    if isinstance(answer, dict) and answer.get("success") is False:
        raise EngineRejected(f"{what} reported no success: {message_of(answer)}", status)


def message_of(answer: Any) -> str:
    """The server's own words, in each of the shapes that SGLang and FastAPI give them."""
    if isinstance(answer, dict):
        error = answer.get("error")
        if isinstance(error, dict):
            return str(error.get("message", error))
        for key in ("message", "error", "detail"):
            if answer.get(key):
                return str(answer[key])
    text = str(answer) if answer is not None else "(empty answer)"
    return text if len(text) <= 2000 else text[:2000] + "..."
