"""The HTTP surface: what all endpoints share, and `/generate`."""

from __future__ import annotations

import asyncio
import hmac
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

import orjson
from starlette.applications import Starlette
from starlette.requests import Request as HttpRequest
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from miles.backends.embedded_engine.answers import answer
from miles.backends.embedded_engine.delivery import Outlet
from miles.backends.embedded_engine.engine import Engine
from miles.backends.embedded_engine.generate_api import EngineFacts, GenerateCall, parse_generate
from miles.backends.embedded_engine.request import Request
from miles.backends.embedded_engine.sampling_params import RequestError
from miles.backends.embedded_engine.weight_sync import WeightSync

logger = logging.getLogger(__name__)
Handler = Callable[[HttpRequest], Awaitable[Response]]


@dataclass
class Service:
    """Everything that the handlers share."""

    engine: Engine
    sync: WeightSync
    facts: EngineFacts
    server_args: dict[str, Any]
    api_key: str | None = None
    admin_api_key: str | None = None
    in_flight: dict[str, Request] = field(default_factory=dict)

    @property
    def weight_version(self) -> str:
        return self.engine.scheduler.weight_version


def reply(content: Any, status: int = 200) -> Response:
    return Response(orjson.dumps(content, option=orjson.OPT_NON_STR_KEYS), status, media_type="application/json")


def error_reply(message: str, status: int) -> Response:
    return reply({"error": {"message": message, "code": status}}, status)


async def json_body(http: HttpRequest) -> Any:
    data = await http.body()
    try:
        return orjson.loads(data) if data else {}
    except orjson.JSONDecodeError as error:
        raise RequestError(f"the body is not valid JSON: {error}") from None


def guarded(service: Service, handler: Handler, *, admin: bool) -> Handler:
    """Check the key, and turn bad requests into 400.

    With an admin key, control calls take that key alone; all others take the API key, if there is one.
    """

    async def call(http: HttpRequest) -> Response:
        wanted = service.admin_api_key if admin and service.admin_api_key else service.api_key
        given = http.headers.get("authorization", "")
        if wanted and not hmac.compare_digest(given, f"Bearer {wanted}"):
            return error_reply("missing or wrong key in the Authorization header", 401)
        try:
            return await handler(http)
        except RequestError as error:
            return error_reply(str(error), 400)
        except Exception as error:
            logger.exception("%s failed", http.url.path)
            return error_reply(f"{type(error).__name__}: {error}", 500)

    return call


# ---- generation --------------------------------------------------------------------------------------------------


async def run_requests(service: Service, requests: list[Request], outlet: Outlet, *, stream: bool) -> None:
    """Hand requests to the engine. Raises: RequestError for an id that is in use."""
    taken = [r.rid for r in requests if r.rid in service.in_flight]
    if taken:
        raise RequestError(f"rid {', '.join(taken)} is in use by a request in flight")
    outlet.expect(len(requests), stream=stream)
    service.in_flight.update((r.rid, r) for r in requests)
    service.engine.submit(requests)


def forget(service: Service, requests: list[Request]) -> None:
    for request in requests:
        service.in_flight.pop(request.rid, None)


async def abandon(service: Service, requests: list[Request]) -> None:
    """The client has gone: stop generating for it."""
    engine = service.engine
    ids = [r.rid for r in requests if not r.finished]
    if ids and engine.death is None:
        engine.call(lambda: engine.abort_exactly(ids))


async def wait_finished(service: Service, http: HttpRequest, requests: list[Request], outlet: Outlet) -> bool:
    """Wait for the answer; False when the client closed the connection first."""
    done = asyncio.ensure_future(outlet.all_finished())
    gone = asyncio.ensure_future(disconnected(http))
    try:
        await asyncio.wait([done, gone], return_when=asyncio.FIRST_COMPLETED)
        if done.done():
            return True
        await abandon(service, requests)
        return False
    finally:
        done.cancel()
        gone.cancel()


async def disconnected(http: HttpRequest) -> None:
    while (await http.receive())["type"] != "http.disconnect":
        pass


def failure_of(requests: list[Request]) -> Response | None:
    """The HTTP error that an aborted request stands for; a client's own abort is no error."""
    for request in requests:
        status = (request.finish_reason or {}).get("status_code")
        if status:
            return error_reply(request.finish_reason["message"], status)  # type: ignore[index]
    return None


def refuse_now(service: Service) -> Response | None:
    """Errors that need no queueing."""
    status = service.engine.faults.request_status()
    if status:
        return error_reply("injected by --fault", status)
    if service.engine.death is not None:
        return error_reply(f"the engine thread has died: {service.engine.death.strip().splitlines()[-1]}", 503)
    if service.engine.paused is None and service.engine.update_session is None:
        refusal = service.engine.cannot_generate()
        if refusal:
            return error_reply(refusal, 400)
    return None


def generate(service: Service) -> Handler:
    async def handler(http: HttpRequest) -> Response:
        outlet = Outlet(asyncio.get_running_loop())
        call = parse_generate(await json_body(http), service.facts, outlet.emit)
        refusal = refuse_now(service)
        if refusal is not None:
            return refusal
        await run_requests(service, call.requests, outlet, stream=call.stream)
        if call.stream:
            return StreamingResponse(_stream(service, call, outlet), media_type="text/event-stream")
        try:
            if not await wait_finished(service, http, call.requests, outlet):
                return error_reply("the client closed the connection", 499)
        finally:
            forget(service, call.requests)
        failure = failure_of(call.requests)
        if failure is not None:
            return failure
        answers = [answer(r, call, service.facts, service.weight_version) for r in call.requests]
        return reply(answers if call.as_list else answers[0])

    return handler


async def _stream(service: Service, call: GenerateCall, outlet: Outlet) -> AsyncIterator[bytes]:
    """Server-sent events, each the whole answer so far; `index` tells the requests of a batch apart."""
    index = {request.rid: i for i, request in enumerate(call.requests)}
    unfinished = len(call.requests)
    try:
        while unfinished:
            request = await outlet.next()
            finished = request.finished
            if request.rid not in index:
                continue  # news of a request whose last chunk went out already
            failure = failure_of([request]) if finished else None
            if failure is not None:
                chunk: Any = orjson.loads(failure.body)
            else:
                chunk = answer(request, call, service.facts, service.weight_version)
                chunk |= {"index": index[request.rid]} if call.as_list else {}
            if finished:
                unfinished -= 1
                del index[request.rid]
            yield b"data: " + orjson.dumps(chunk) + b"\n\n"
        yield b"data: [DONE]\n\n"
    finally:
        forget(service, call.requests)
        await abandon(service, call.requests)


def create_app(service: Service) -> Starlette:
    from miles.backends.embedded_engine.control_api import control_routes
    from miles.backends.embedded_engine.openai_api import openai_routes
    from miles.backends.embedded_engine.state_api import (
        health,
        health_generate,
        metrics,
        model_info,
        models,
        server_info,
    )

    def route(path: str, handler: Handler, *methods: str) -> Route:
        return Route(path, guarded(service, handler, admin=False), methods=list(methods))

    return Starlette(
        routes=[
            Route("/health", health(service), methods=["GET"]),
            Route("/health_generate", health_generate(service), methods=["GET"]),
            Route("/ready", health(service), methods=["GET"]),
            Route("/metrics", metrics(service), methods=["GET"]),
            route("/generate", generate(service), "POST", "PUT"),
            route("/model_info", model_info(service), "GET"),
            route("/get_model_info", model_info(service), "GET"),
            route("/server_info", server_info(service), "GET"),
            route("/get_server_info", server_info(service), "GET"),
            route("/v1/models", models(service), "GET"),
            *openai_routes(service),
            *control_routes(service),
        ]
    )
