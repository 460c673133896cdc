"""A real HTTP server in a thread whose answers a test scripts."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable

import orjson
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from miles.utils.process import reserve_port


class Script:
    """`answers[path]` is a list of answers, given in turn, the last one for ever: (status, body), or an async function."""

    def __init__(self) -> None:
        self.answers: dict[str, list] = {}
        self.requests: list[tuple[str, dict, dict]] = []  # path, headers, body
        self.cancelled = threading.Event()

    def seen(self, path: str) -> list[dict]:
        return [body for p, _, body in self.requests if p == path]

    async def handle(self, request: Request) -> Response:
        path = request.url.path
        self.requests.append((path, dict(request.headers), orjson.loads(await request.body() or b"{}")))
        answers = self.answers.get(path, [(200, {"success": True})])
        answer = answers.pop(0) if len(answers) > 1 else answers[0]
        if isinstance(answer, Callable):
            return await answer(request)
        status, body = answer
        return Response(body, status) if isinstance(body, bytes) else JSONResponse(body, status)

    async def hang(self, request: Request) -> Response:
        try:
            for _ in range(600):
                await asyncio.sleep(0.02)
                if await request.is_disconnected():
                    self.cancelled.set()
                    break
        except asyncio.CancelledError:
            self.cancelled.set()
            raise
        return Response("")


@contextlib.contextmanager
def serve(script: Script):
    """Yields the base url."""
    listener = reserve_port()
    app = Starlette(routes=[Route("/{path:path}", script.handle, methods=["GET", "POST"])])
    server = uvicorn.Server(uvicorn.Config(app, log_level="error", lifespan="off"))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        server.should_exit = server.force_exit = True
        thread.join(5)
        listener.close()
