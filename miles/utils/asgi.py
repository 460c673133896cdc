"""What the HTTP servers of a run share: bodies with a limit, JSON answers, and work that ends when its client leaves."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from contextlib import suppress
from typing import Any, TypeVar

import orjson
from starlette.requests import Request
from starlette.responses import Response

T = TypeVar("T")


class BodyTooLarge(ValueError):
    """More bytes than the server takes."""


def json_reply(content: Any, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    body = orjson.dumps(content, option=orjson.OPT_SERIALIZE_NUMPY | orjson.OPT_NON_STR_KEYS)
    return Response(body, status, headers, media_type="application/json")


async def read_json(http: Request, limit: int) -> Any:
    """The parsed body, `{}` for an empty one. Raises: BodyTooLarge; ValueError for what is no JSON in UTF-8."""
    if int(http.headers.get("content-length") or 0) > limit:
        raise BodyTooLarge(f"the body has {http.headers['content-length']} bytes; at most {limit} are taken")
    parts, size = [], 0
    async for part in http.stream():
        size += len(part)
        if size > limit:
            raise BodyTooLarge(f"the body has more than {limit} bytes, the most that is taken")
        parts.append(part)
    data = b"".join(parts)
    try:
        return orjson.loads(data) if data else {}
    except orjson.JSONDecodeError as error:
        raise ValueError(f"invalid JSON body: {error}") from None


async def unless_gone(http: Request, work: Awaitable[T]) -> T | None:
    """What `work` returns; None when the client went away first, and then the work is cancelled.

    The whole body must have been read.
    """
    task, gone = asyncio.ensure_future(work), asyncio.ensure_future(_disconnected(http))
    try:
        await asyncio.wait([task, gone], return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task
        return None
    finally:
        task.cancel()
        gone.cancel()


async def _disconnected(http: Request) -> None:
    while (await http.receive())["type"] != "http.disconnect":
        pass
