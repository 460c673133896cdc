"""What the endpoints of a session server share: keys, bodies, errors, and generations that end when their client leaves."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import orjson
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from miles.rollout.session.collect import AssemblyError, Collector
from miles.rollout.session.config import SessionConfig
from miles.rollout.session.errors import RequestRefused, SessionError, TooLarge
from miles.rollout.session.store import Session, SessionStore
from miles.rollout.session.turns import Answer, Prepared, Recorder
from miles.rollout.session.upstream import Upstream
from miles.rollout.tito.matchers import MatcherError
from miles.rollout.tito.replies import Reply
from miles.rollout.tito.template import MessageError

logger = logging.getLogger(__name__)

Handler = Callable[[Request], Awaitable[Response]]


@dataclass
class Service:
    """Everything that the handlers share."""

    config: SessionConfig
    store: SessionStore
    recorder: Recorder
    collector: Collector
    upstream: Upstream

    def session(self, http: Request) -> Session:
        """The session that a request names and has the key of."""
        session_id, _, key = http.path_params["session"].partition(".")
        return self.store.get(session_id, key or sent_key(http))


def sent_key(http: Request) -> str | None:
    scheme, _, token = http.headers.get("authorization", "").partition(" ")
    if scheme.lower() == "bearer" and token:
        return token.strip()
    return http.headers.get("x-api-key")


def reply(content: Any, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    body = orjson.dumps(content, option=orjson.OPT_SERIALIZE_NUMPY | orjson.OPT_NON_STR_KEYS)
    return Response(body, status, headers, media_type="application/json")


def as_session_error(error: Exception) -> tuple[int, str, bool]:
    """Status, text, and whether the same request may do better later."""
    if isinstance(error, SessionError):
        return error.status, str(error), error.retryable
    if isinstance(error, AssemblyError):
        return 422, str(error), False
    if isinstance(error, MessageError):
        return 400, str(error), False
    if isinstance(error, MatcherError):
        return 500, str(error), False
    logger.exception("a request failed", exc_info=error)
    return 500, f"{type(error).__name__}: {error}", False


def error_reply(error: Exception) -> Response:
    status, text, retryable = as_session_error(error)
    if isinstance(error, AssemblyError):
        return Response(text, status, media_type="text/plain")
    # The official clients heed this header; without it they repeat conflicts and server errors by themselves.
    content = {"error": {"message": text, "type": type(error).__name__, "code": status}}
    return reply(content, status, None if retryable else {"x-should-retry": "false"})


def guarded(handler: Handler) -> Handler:
    async def call(http: Request) -> Response:
        try:
            return await handler(http)
        except HTTPException:
            raise
        except Exception as error:
            return error_reply(error)

    return call


async def json_body(http: Request, limit: int) -> Any:
    """Raises: TooLarge, RequestRefused."""
    if int(http.headers.get("content-length") or 0) > limit:
        raise TooLarge(f"the body has {http.headers['content-length']} bytes; at most {limit} are taken")
    parts, size = [], 0
    async for part in http.stream():
        size += len(part)
        if size > limit:
            raise TooLarge(f"the body has more than {limit} bytes, the most that is taken")
        parts.append(part)
    data = b"".join(parts)
    try:
        return orjson.loads(data) if data else {}
    except orjson.JSONDecodeError as error:
        raise RequestRefused(f"invalid JSON body: {error}") from None


async def disconnected(http: Request) -> None:
    while (await http.receive())["type"] != "http.disconnect":
        pass


async def generate_or_leave(service: Service, http: Request, session: Session, prepared: Prepared) -> Answer | None:
    """The committed answer; None when the client went away first, and then generation stops and nothing is kept."""
    work = asyncio.ensure_future(service.recorder.generate(session, prepared))
    gone = asyncio.ensure_future(disconnected(http))
    session.running.add(work)
    try:
        await asyncio.wait([work, gone], return_when=asyncio.FIRST_COMPLETED)
        if not work.done():
            work.cancel()
            with suppress(asyncio.CancelledError):
                await work
            return None
        if work.cancelled():
            raise SessionError(f"session {session.id} was deleted while it generated")
        return work.result()
    finally:
        work.cancel()
        gone.cancel()
        session.running.discard(work)


async def begun_stream(service: Service, session: Session, prepared: Prepared) -> AsyncIterator[Reply | Answer]:
    """A stream that has begun, so that what goes wrong before the first token keeps its status."""
    parts = service.recorder.stream(session, prepared)
    first = await anext(parts)

    async def rest() -> AsyncIterator[Reply | Answer]:
        task = asyncio.current_task()
        if task is not None:
            session.running.add(task)
        try:
            yield first
            async for part in parts:
                yield part
        finally:
            if task is not None:
                session.running.discard(task)
            await parts.aclose()  # type: ignore[attr-defined]

    return rest()


def event_stream(events: AsyncIterator[bytes], on_error: Callable[[Exception], bytes]) -> StreamingResponse:
    """Events as they come; an error in mid-stream becomes the last event."""

    async def guarded_events() -> AsyncIterator[bytes]:
        try:
            async for event in events:
                yield event
        except Exception as error:
            yield on_error(error)

    headers = {"cache-control": "no-cache", "x-accel-buffering": "no"}
    return StreamingResponse(guarded_events(), media_type="text/event-stream", headers=headers)
