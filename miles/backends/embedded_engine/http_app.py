"""The HTTP surface: generation and state. Control endpoints are in `control_api`, OpenAI's in `openai_api`."""

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
from starlette.responses import PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route

from miles.backends.embedded_engine.delivery import Outlet
from miles.backends.embedded_engine.engine import Engine
from miles.backends.embedded_engine.generate_api import EngineFacts, GenerateCall, answer, parse_generate
from miles.backends.embedded_engine.request import Request
from miles.backends.embedded_engine.sampling_params import RequestError
from miles.backends.embedded_engine.weight_sync import WeightSync

logger = logging.getLogger(__name__)
STUCK_AFTER_S = 60.0  # a step or call that takes longer makes /health answer 503
_PROBE_TIMEOUT_S = 20.0
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
        engine.call(lambda: [engine.abort_exactly(rid) for rid in ids])


async def wait_finished(service: Service, http: HttpRequest, requests: list[Request], outlet: Outlet) -> bool:
    """Wait for the answer; False when the client closed the connection first."""
    done = asyncio.ensure_future(outlet.all_finished())
    gone = asyncio.ensure_future(_disconnected(http))
    try:
        await asyncio.wait([done, gone], return_when=asyncio.FIRST_COMPLETED)
        if done.done():
            return True
        await abandon(service, requests)
        return False
    finally:
        done.cancel()
        gone.cancel()


async def _disconnected(http: HttpRequest) -> None:
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


# ---- state -------------------------------------------------------------------------------------------------------


def health(service: Service) -> Handler:
    """200 while the engine thread lives and is not stuck; generates nothing, so pauses and updates do not matter."""

    async def handler(http: HttpRequest) -> Response:
        engine = service.engine
        if engine.faults.still_starting:
            return PlainTextResponse("starting", 503)
        if engine.death is not None or not engine.thread.is_alive():
            return PlainTextResponse("the engine thread has died", 503)
        seconds, what = engine.stuck_for()
        if seconds > STUCK_AFTER_S:
            return PlainTextResponse(f"stuck in {what} for {seconds:.0f} s", 503)
        return PlainTextResponse("")

    return handler


def health_generate(service: Service) -> Handler:
    """Generates one token, except while paused or without weights: then the engine thread only has to answer."""
    plain = health(service)

    async def handler(http: HttpRequest) -> Response:
        status = await plain(http)
        if status.status_code != 200:
            return status
        engine = service.engine
        try:
            if engine.paused or engine.update_session or engine.cannot_generate():
                await asyncio.wait_for(asyncio.wrap_future(engine.call(lambda: None)), _PROBE_TIMEOUT_S)
            else:
                outlet = Outlet(asyncio.get_running_loop())
                body = {"input_ids": [0], "sampling_params": {"max_new_tokens": 1, "temperature": 0}}
                call = parse_generate(body, service.facts, outlet.emit)
                await run_requests(service, call.requests, outlet, stream=False)
                try:
                    await asyncio.wait_for(outlet.all_finished(), _PROBE_TIMEOUT_S)
                finally:
                    forget(service, call.requests)
        except TimeoutError:
            return PlainTextResponse(f"no answer within {_PROBE_TIMEOUT_S:g} s", 503)
        return PlainTextResponse("")

    return handler


def model_info(service: Service) -> Handler:
    async def handler(http: HttpRequest) -> Response:
        config = service.facts.config
        return reply(
            {
                "model_path": service.sync.model_path,
                "served_model_name": service.server_args["served_model_name"],
                "tokenizer_path": service.sync.model_path if service.facts.tokenizer is not None else None,
                "is_generation": True,
                "weight_version": service.weight_version,
                "load_format": "auto",
                "model_type": config.architecture,
                "architectures": service.server_args["architectures"],
                "vocab_size": config.vocab_size,
                "context_length": config.context_length,
                "has_image_understanding": False,
                "has_audio_understanding": False,
            }
        )

    return handler


def server_info(service: Service) -> Handler:
    async def handler(http: HttpRequest) -> Response:
        engine, scheduler = service.engine, service.engine.scheduler
        pool = scheduler.pool
        return reply(
            service.server_args
            | {
                "version": "embedded",
                "max_total_num_tokens": service.facts.capacity,
                "weight_version": service.weight_version,
                "paused": engine.paused,
                "weight_update_open": engine.update_session is not None,
                "released_tags": sorted(engine.released),
                "internal_states": [
                    {
                        "num_running_reqs": scheduler.num_active,
                        "num_waiting_reqs": len(scheduler.waiting) + len(engine.held),
                        "cached_prefix_pages": scheduler.cache.num_pages,
                        "free_pages": pool.num_free,
                        "total_pages": pool.pages - 1,
                        "generated_tokens": scheduler.generated_tokens,
                        "steps": scheduler.steps,
                    }
                ],
            }
        )

    return handler


def models(service: Service) -> Handler:
    async def handler(http: HttpRequest) -> Response:
        entry = {
            "id": service.server_args["served_model_name"],
            "object": "model",
            "owned_by": "miles",
            "max_model_len": service.facts.config.context_length,
        }
        return reply({"object": "list", "data": [entry]})

    return handler


def metrics(service: Service) -> Handler:
    """Prometheus text, a few gauges and counters."""

    async def handler(http: HttpRequest) -> Response:
        scheduler = service.engine.scheduler
        values = {
            "sglang:num_running_reqs": scheduler.num_active,
            "sglang:num_queue_reqs": len(scheduler.waiting) + len(service.engine.held),
            "sglang:generation_tokens_total": scheduler.generated_tokens,
            "sglang:token_usage": 1 - scheduler.pool.num_free / max(scheduler.pool.pages - 1, 1),
        }
        return PlainTextResponse("".join(f"{name} {value}\n" for name, value in values.items()))

    return handler


def create_app(service: Service) -> Starlette:
    from miles.backends.embedded_engine.control_api import control_routes
    from miles.backends.embedded_engine.openai_api import openai_routes

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
