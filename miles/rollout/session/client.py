"""One session as the rollout process uses it: opened for an agent, collected, deleted."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

import aiohttp

from miles.rollout.session.wire import SessionSamples, decode_samples
from miles.utils.types import Sample

logger = logging.getLogger(__name__)

_TIMEOUT_S = 120.0
_open_sessions: dict[int, int] = {}  # by port: sessions that this process holds


class SessionCallError(RuntimeError):
    """A session server that does not do what it was asked. `category` is what metrics count."""

    def __init__(self, category: str, message: str) -> None:
        super().__init__(message)
        self.category = category


class SessionClient:
    """Opened with `await SessionClient.open(args, ...)`; `close` always, whatever happened.

    Attributes:
        base_url: what an agent gets; it holds the session's key, so any API key will do.
    """

    def __init__(self, http: aiohttp.ClientSession, root: str, port: int, session_id: str, key: str) -> None:
        self._http, self.port, self.session_id, self.key = http, port, session_id, key
        self.server_id = root.removeprefix("http://")
        self.base_url = f"{root}/sessions/{session_id}.{key}"

    @classmethod
    async def open(cls, args: Any, *, seed: int | None = None, max_seq_len: int | None = None) -> SessionClient:
        """A new session on the server with the fewest of ours. Raises: SessionCallError."""
        ports = getattr(args, "session_server_ports", None)
        if not ports:
            raise SessionCallError("no_session_server", "no session server runs: set --use-session-server")
        port = min(ports, key=lambda p: (_open_sessions.get(p, 0), p))
        _open_sessions[port] = _open_sessions.get(port, 0) + 1
        http = aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=_TIMEOUT_S))
        try:
            root = f"http://{args.session_server_ip}:{port}"
            body = {"seed": seed, "max_seq_len": max_seq_len}
            headers = {"authorization": f"Bearer {args.session_server_key}"}
            async with http.post(f"{root}/sessions", json=body, headers=headers) as reply:
                await _check(reply)
                made = await reply.json()
            return cls(http, root, port, made["session_id"], made["api_key"])
        except BaseException as error:
            _open_sessions[port] -= 1
            await http.close()
            if isinstance(error, aiohttp.ClientError | TimeoutError | OSError):
                raise SessionCallError(
                    "session_server", f"no session could be opened on port {port}: {error}"
                ) from error
            raise

    async def collect(
        self, source: Sample, *, max_seq_len: int | None = None, agent_metadata: dict[str, Any] | None = None
    ) -> SessionSamples:
        """Samples in the image of `source`. Raises: SessionCallError."""
        body = {"max_seq_len": max_seq_len, "metadata": agent_metadata}
        try:
            async with self._http.post(f"{self.base_url}/samples", json=body) as reply:
                await _check(reply)
                return decode_samples(await reply.read(), source)
        except (aiohttp.ClientError, TimeoutError, OSError, ValueError) as error:
            raise SessionCallError("session_collect", f"session {self.session_id}: no samples: {error}") from error

    async def close(self) -> None:
        """Delete the session; what it still generates is stopped. A failure is only logged: sessions expire."""
        _open_sessions[self.port] -= 1
        try:
            async with self._http.delete(self.base_url) as reply:
                if reply.status not in (204, 404):
                    logger.warning("session %s was not deleted: status %d", self.session_id, reply.status)
        except (aiohttp.ClientError, TimeoutError, OSError, asyncio.CancelledError) as error:
            logger.warning("session %s was not deleted: %s", self.session_id, error)
        finally:
            await self._http.close()


async def _check(reply: aiohttp.ClientResponse) -> None:
    if reply.status >= 300:
        raise SessionCallError(
            "session_refused", f"{reply.method} {reply.url.path} was answered with {reply.status}: {await reply.text()}"
        )
