"""The HTTP surface of the router process (`--use-miles-router`).

    POST   /generate            as an engine's, streaming or not; header `X-SMG-Routing-Key` keeps equal keys together
    POST   /abort_request       on every engine (the run's key)
    GET    /health, /model_info whether the router itself serves
    PUT    /engines             which engines there are: {index: {url, dp_ranks}} (the run's key)
    GET    /workers, /list_workers
    POST   /workers, /add_worker   one more engine, by url (the run's key)

Answers are the engine's own, `meta_info` and all. Nothing else is passed on.
"""

from __future__ import annotations

import asyncio
import hmac
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import orjson
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from miles.backends.engine_api.errors import EngineError, EngineRejected, EngineTimeout
from miles.router.engine_pool import NoEngineError
from miles.router.members import EngineAddress, Members
from miles.utils.asgi import BodyTooLarge, json_reply, read_json, unless_gone

ROUTING_KEY = "x-smg-routing-key"
_MAX_BODY = 256 << 20


@dataclass(frozen=True)
class RouterConfig:
    """What a router process is told when it starts.

    Attributes:
        key: of the run: says which engines there are, and aborts.
        engine_key: that engines want with a generation; None where they want none.
        health_interval_s, health_failures: how often engines are asked whether they live, and after how many failures in a
            row one is out of service until it answers again.
    """

    key: str
    engine_key: str | None = None
    request_timeout_s: float = 600.0
    recovery_timeout_s: float = 600.0
    health_interval_s: float = 10.0
    health_failures: int = 3
    max_connections: int = 0


def create_app(config: RouterConfig, members: Members | None = None) -> Starlette:
    """The router's application; `members` are made from `config` where none are given."""
    router = _Router(config, members)

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        task = asyncio.create_task(router.watch())
        yield
        task.cancel()
        await router.members.close()

    routes = [
        ("/generate", "POST", router.generate),
        ("/abort_request", "POST", router.abort),
        ("/health", "GET", router.health),
        ("/model_info", "GET", router.health),
        ("/engines", "PUT", router.set_engines),
        ("/workers", "GET", router.list_workers),
        ("/list_workers", "GET", router.list_workers),
        ("/workers", "POST", router.add_worker),
        ("/add_worker", "POST", router.add_worker),
    ]
    return Starlette(lifespan=lifespan, routes=[Route(path, _guarded(h), methods=[m]) for path, m, h in routes])


class _Router:
    def __init__(self, config: RouterConfig, members: Members | None) -> None:
        self.config = config
        self.members = members or Members(
            request_timeout_s=config.request_timeout_s,
            recovery_timeout_s=config.recovery_timeout_s,
            key=config.engine_key,
            max_connections=config.max_connections,
        )

    async def watch(self) -> None:
        while True:
            await asyncio.sleep(self.config.health_interval_s)
            await self.members.probe(self.config.health_failures)

    # ---- generation ------------------------------------------------------------------------------------------------

    async def generate(self, http: Request) -> Response:
        body = await read_json(http, _MAX_BODY)
        if not isinstance(body, dict):
            raise ValueError(f"the body must be a JSON object, not a {type(body).__name__}")
        key = http.headers.get(ROUTING_KEY) or body.get("routing_key")
        if body.get("stream"):
            parts = self.members.pool.generate_stream(body, key)
            first = await unless_gone(http, anext(parts, None))
            return StreamingResponse(_events(first, parts), media_type="text/event-stream")
        answer = await unless_gone(http, self.members.pool.generate(body, key))
        return json_reply(answer, 200 if answer is not None else 499)

    async def abort(self, http: Request) -> Response:
        self._check_key(http)
        body = await read_json(http, _MAX_BODY)
        if body.get("abort_all"):
            await self.members.pool.abort_all()
        else:
            clients = [self.members.pool.client(index) for index in self.members.pool.healthy()]
            await asyncio.gather(*(client.abort(body.get("rid")) for client in clients if client is not None))
        return Response(status_code=200)

    # ---- engines ---------------------------------------------------------------------------------------------------

    async def health(self, http: Request) -> Response:
        pool = self.members.pool
        loads = {self.members.addresses[index].url: pool.load(index) for index in pool.healthy()}
        return json_reply({"status": "ok", "engines": loads})

    async def set_engines(self, http: Request) -> Response:
        self._check_key(http)
        body = await read_json(http, _MAX_BODY)
        try:
            named = {int(index): EngineAddress(**address) for index, address in body.items()}
        except (AttributeError, TypeError, ValueError) as error:
            raise ValueError(f"the body must be {{index: {{url, dp_ranks}}}}: {error}") from error
        await self.members.set(named)
        return Response(status_code=204)

    async def list_workers(self, http: Request) -> Response:
        serving = set(self.members.pool.healthy())
        workers = [
            {"url": address.url, "is_healthy": index in serving, "load": self.members.pool.load(index)}
            for index, address in sorted(self.members.addresses.items())
        ]
        return json_reply({"urls": [worker["url"] for worker in workers], "workers": workers})

    async def add_worker(self, http: Request) -> Response:
        """An engine by url, from the query or the body; one that is known already is left alone."""
        self._check_key(http)
        body = await read_json(http, _MAX_BODY)
        given = body if isinstance(body, dict) else {}
        query = http.query_params
        url = query.get("url") or query.get("worker_url") or given.get("url") or given.get("worker_url")
        if not isinstance(url, str) or not url.startswith("http"):
            raise ValueError("name the engine: ?url=http://HOST:PORT, or {url: ...}")
        engines = self.members.addresses
        if url.rstrip("/") not in {address.url for address in engines.values()}:
            ranks = given.get("dp_ranks", 1)
            if type(ranks) is not int or ranks < 1:
                raise ValueError("dp_ranks must be a positive integer")
            await self.members.set(engines | {max(engines, default=-1) + 1: EngineAddress(url.rstrip("/"), ranks)})
        loads = {a.url: self.members.pool.load(i) for i, a in self.members.addresses.items()}
        return json_reply({"status": "success", "worker_urls": loads})

    def _check_key(self, http: Request) -> None:
        sent = http.headers.get("authorization", "").removeprefix("Bearer ").strip()
        if not hmac.compare_digest(sent.encode(), self.config.key.encode()):
            raise PermissionError("missing or wrong key of the run (Authorization: Bearer KEY)")


async def _events(first: dict[str, Any] | None, rest: AsyncIterator[dict[str, Any]]) -> AsyncIterator[bytes]:
    """Chunks as they come; an error in mid-stream becomes the last event, as an engine has it."""
    try:
        if first is not None:
            yield _event(first)
        async for chunk in rest:
            yield _event(chunk)
    except EngineError as error:
        yield _event({"error": {"message": str(error), "code": _status(error)}})
    yield b"data: [DONE]\n\n"


def _event(chunk: dict[str, Any]) -> bytes:
    return b"data: " + orjson.dumps(chunk) + b"\n\n"


def _guarded(handler: Callable[[Request], Awaitable[Response]]) -> Callable[[Request], Awaitable[Response]]:
    async def call(http: Request) -> Response:
        try:
            return await handler(http)
        except (EngineError, ValueError, PermissionError) as error:
            return json_reply({"error": {"message": str(error), "code": _status(error)}}, _status(error))

    return call


def _status(error: Exception) -> int:
    if isinstance(error, EngineRejected):
        return error.status if 400 <= error.status < 500 and error.status not in (401, 403) else 400
    if isinstance(error, EngineError):
        return 503 if isinstance(error, NoEngineError) else 504 if isinstance(error, EngineTimeout) else 502
    return 401 if isinstance(error, PermissionError) else 413 if isinstance(error, BodyTooLarge) else 400
