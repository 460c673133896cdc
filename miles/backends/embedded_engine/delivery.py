"""From the engine thread back to the event loop: each HTTP call waits on its own outlet."""

from __future__ import annotations

import asyncio

from miles.backends.embedded_engine.request import Request


class Outlet:
    """Collects the requests of one HTTP call. `emit` is called in the engine thread, the rest in the event loop."""

    def __init__(self, loop: asyncio.AbstractEventLoop):
        self._loop = loop
        self._left = 0
        self._done: asyncio.Future[None] = loop.create_future()
        self._queue: asyncio.Queue[Request] | None = None

    def expect(self, count: int, *, stream: bool) -> None:
        self._left = count
        if stream:
            self._queue = asyncio.Queue()

    def emit(self, request: Request) -> None:
        if self._queue is not None:
            self._loop.call_soon_threadsafe(self._queue.put_nowait, request)
        elif request.finished:
            self._left -= 1
            if self._left == 0:
                self._loop.call_soon_threadsafe(self._finish)

    def _finish(self) -> None:
        if not self._done.done():
            self._done.set_result(None)

    async def all_finished(self) -> None:
        await self._done

    async def next(self) -> Request:
        """The next request of a stream that has news."""
        assert self._queue is not None
        return await self._queue.get()
