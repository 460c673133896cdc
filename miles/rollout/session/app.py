"""The HTTP surface of a session server.

    POST   /sessions                              make a session (the run's key)
    GET    /sessions/{id}                         its last line, and facts about it
    DELETE /sessions/{id}
    POST   /sessions/{id}/samples                 what it gives to training
    POST   /sessions/{id}/v1/chat/completions     OpenAI
    POST   /sessions/{id}/v1/messages             Anthropic
    GET    /sessions/{id}/v1/models
    PUT    /engines                               which engines there are (the run's key)
    GET    /health

`{id}` is `ID.KEY`, as a session's base URL has it, or `ID` with the key in a header. Nothing else is passed on to an engine.
"""

from __future__ import annotations

import asyncio
import hmac
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import orjson
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from miles.rollout.session.chat_api import chunks, completion, parse_chat, token_logprobs
from miles.rollout.session.errors import RequestRefused, WrongKey
from miles.rollout.session.http import (
    Handler,
    Service,
    as_session_error,
    begun_stream,
    event_stream,
    generate_or_leave,
    guarded,
    json_body,
    reply,
    sent_key,
)
from miles.rollout.session.messages_api import messages, messages_guarded
from miles.rollout.session.upstream import Engines
from miles.rollout.session.wire import encode_samples
from miles.router.members import EngineAddress

_EXPIRY_TICK_S = 10.0


def chat_completions(service: Service) -> Handler:
    async def handler(http: Request) -> Response:
        session = service.session(http)
        body = await json_body(http, service.config.max_body_bytes)
        request = parse_chat(body)
        prepared = service.recorder.prepare(session, request)
        model = body.get("model") or "policy"
        if body.get("stream"):
            parts = await begun_stream(service, session, prepared)
            include_usage = bool((body.get("stream_options") or {}).get("include_usage"))
            id = f"chatcmpl-{prepared.payload['rid']}"
            return event_stream(chunks(parts, id, model, include_usage), _chat_error_event)
        answer = await generate_or_leave(service, http, session, prepared)
        if answer is None:
            return reply({"error": {"message": "the client closed the connection", "code": 499}}, 499)
        decode = service.recorder.tito.encoder.decode
        logprobs = token_logprobs(answer, decode) if body.get("logprobs") else None
        return reply(completion(answer, model, logprobs=logprobs))

    return handler


def _chat_error_event(error: Exception) -> bytes:
    status, text, _ = as_session_error(error)
    return b"data: " + orjson.dumps({"error": {"message": text, "code": status}}) + b"\n\n"


def create_session(service: Service) -> Handler:
    async def handler(http: Request) -> Response:
        _check_run_key(service, http)
        body = await json_body(http, service.config.max_body_bytes)
        body = body if isinstance(body, dict) else {}
        wrong = [n for n in ("seed", "max_seq_len") if not isinstance(body.get(n), int | None)]
        if wrong:
            raise RequestRefused(f"{', '.join(wrong)} must be integers")
        session = service.store.create(seed=body.get("seed"), max_seq_len=body.get("max_seq_len"))
        return reply({"session_id": session.id, "api_key": session.key})

    return handler


def get_session(service: Service) -> Handler:
    async def handler(http: Request) -> Response:
        session = service.session(http)
        collector = service.collector
        return reply(
            {
                "session_id": session.id,
                "records": collector.records(session),
                "metadata": collector.metadata(session),
            }
        )

    return handler


def delete_session(service: Service) -> Handler:
    async def handler(http: Request) -> Response:
        service.store.delete(service.session(http))
        return Response(status_code=204)

    return handler


def samples(service: Service) -> Handler:
    async def handler(http: Request) -> Response:
        session = service.session(http)
        body = await json_body(http, service.config.max_body_bytes)
        if not isinstance(body, dict) or not isinstance(body.get("metadata") or {}, dict):
            raise RequestRefused("the body must be {max_seq_len: int or null, metadata: object}")
        content = service.collector.collect(session, body.get("max_seq_len"), body.get("metadata"))
        return Response(encode_samples(content), media_type="application/octet-stream")

    return handler


def models(service: Service) -> Handler:
    async def handler(http: Request) -> Response:
        service.session(http)
        return reply(
            {"object": "list", "data": [{"id": "policy", "object": "model", "created": 0, "owned_by": "miles"}]}
        )

    return handler


def set_engines(service: Service) -> Handler:
    async def handler(http: Request) -> Response:
        _check_run_key(service, http)
        body = await json_body(http, service.config.max_body_bytes)
        if not isinstance(service.upstream, Engines):
            raise RequestRefused("this server's engines are fixed")
        await service.upstream.set({int(index): EngineAddress(**address) for index, address in body.items()})
        return Response(status_code=204)

    return handler


def health(service: Service) -> Handler:
    async def handler(http: Request) -> Response:
        store = service.store
        facts = {"sessions": len(store.sessions), "bytes": store.bytes, "expired": store.expired}
        return reply({"status": "ok", "session_server_instance_id": service.config.instance_id, **facts})

    return handler


def _check_run_key(service: Service, http: Request) -> None:
    if not hmac.compare_digest((sent_key(http) or "").encode(), service.config.key.encode()):
        raise WrongKey("missing or wrong key of the run")


def create_app(service: Service) -> Starlette:
    async def expire() -> None:
        while True:
            await asyncio.sleep(min(_EXPIRY_TICK_S, service.config.idle_timeout_s))
            service.store.expire()

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        task = asyncio.create_task(expire())
        yield
        task.cancel()
        if isinstance(service.upstream, Engines):
            await service.upstream.close()

    def route(path: str, handler: Handler, method: str) -> Route:
        return Route(path, guarded(handler), methods=[method])

    one = "/sessions/{session}"
    return Starlette(
        lifespan=lifespan,
        routes=[
            route("/health", health(service), "GET"),
            route("/engines", set_engines(service), "PUT"),
            route("/sessions", create_session(service), "POST"),
            route(one, get_session(service), "GET"),
            route(one, delete_session(service), "DELETE"),
            route(one + "/samples", samples(service), "POST"),
            route(one + "/v1/chat/completions", chat_completions(service), "POST"),
            Route(one + "/v1/messages", messages_guarded(messages(service)), methods=["POST"]),
            route(one + "/v1/models", models(service), "GET"),
        ],
    )
