"""An event loop of its own for users' async reward functions, so that one that blocks holds up no engine and no rollout.

`async def reward(...): requests.post(...)` blocks the loop that it runs on. Here that is a thread which the rollout can
do without: when a call has blocked it for longer than a reward may take, the thread is abandoned, that call fails, and
the calls that waited behind it start again on a fresh loop.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine, Generator
from typing import Any

from miles.rollout.rm_hub.timing import TooLate, within

_BEAT_S = 0.02
_LOOK_S = 0.1
_STARTS = 5  # how often a call may start again because others blocked its loop


class RewardBlocked(Exception):
    """A call that kept the reward loop from running anything else."""


def plain_exception(error: BaseException) -> Exception:
    """The error itself, or, for what would end a thread or break a future, a RuntimeError that names it."""
    if isinstance(error, Exception) and not isinstance(error, StopIteration):
        return error
    return RuntimeError(f"{type(error).__name__}: {error}")


class RewardLoop:
    """Usable from any event loop; starts its thread with the first call."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._thread: _LoopThread | None = None

    async def run(self, make: Callable[[], Coroutine[Any, Any, Any]], timeout_s: float) -> Any:
        """Run the coroutine that `make` gives, for at most `timeout_s` seconds in which its loop was responsive.

        Raises: TooLate; RewardBlocked where it blocked the loop for that long; what the coroutine raises.
        """
        for _ in range(_STARTS):
            thread = self._running_thread()
            call = _Call(make, thread)
            submitted = asyncio.run_coroutine_threadsafe(within(call.run(), timeout_s), thread.loop)
            future = asyncio.wrap_future(submitted)
            try:
                if await self._done(future, thread, timeout_s):
                    if future.cancelled():  # not this call's caller, who would not be here
                        raise RuntimeError("the reward function cancelled itself")
                    return future.result()
            finally:
                if not future.done():
                    future.cancel()
            if thread.culprit in (None, call):
                raise RewardBlocked
        raise TooLate

    async def _done(self, future: asyncio.Future, thread: _LoopThread, timeout_s: float) -> bool:
        """Wait for the call; False when its loop has been blocked for `timeout_s`.

        Time is counted in looks, so that a stall of this whole process is nobody's fault.
        """
        beat, blocked_s = thread.beat, 0.0
        while not (await asyncio.wait({future}, timeout=_LOOK_S))[0]:
            blocked_s = blocked_s + _LOOK_S if thread.beat == beat else 0.0
            beat = thread.beat
            if thread.abandoned or blocked_s > timeout_s:
                self._abandon(thread)
                return False
        return True

    def _running_thread(self) -> _LoopThread:
        with self._lock:
            if self._thread is None:
                self._thread = _LoopThread()
            return self._thread

    def _abandon(self, thread: _LoopThread) -> None:
        with self._lock:
            if not thread.abandoned:
                thread.abandoned, thread.culprit = True, thread.running
                thread.loop.call_soon_threadsafe(thread.loop.stop)
            if self._thread is thread:
                self._thread = None

    async def close(self, last: Callable[[], Coroutine[Any, Any, Any]], timeout_s: float) -> None:
        """Run `last` on the loop, then end it. Does not wait for calls that are still under way."""
        with self._lock:
            thread, self._thread = self._thread, None
        if thread is None:
            return
        ending = asyncio.wrap_future(asyncio.run_coroutine_threadsafe(last(), thread.loop))
        await asyncio.wait({ending}, timeout=timeout_s)
        thread.loop.call_soon_threadsafe(thread.loop.stop)


class _LoopThread:
    """A daemon thread with an event loop, whose heart beats as long as nothing blocks it."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self.beat = 0
        self.running: _Call | None = None  # the call that has the thread right now
        self.culprit: _Call | None = None  # the one that had it when the loop was abandoned
        self.abandoned = False
        self.loop.call_soon(self._tick)
        threading.Thread(target=self._run, name="rewards", daemon=True).start()

    def _run(self) -> None:
        asyncio.set_event_loop(self.loop)
        try:
            self.loop.run_forever()
        finally:
            self.loop.close()

    def _tick(self) -> None:
        self.beat += 1
        self.loop.call_later(_BEAT_S, self._tick)


class _Call:
    """One coroutine, noted as running while it has the thread, and not while it waits."""

    def __init__(self, make: Callable[[], Coroutine[Any, Any, Any]], thread: _LoopThread) -> None:
        self.make, self.thread = make, thread

    async def run(self) -> Any:
        try:
            return await _Stepped(self)
        except (SystemExit, KeyboardInterrupt, StopIteration) as error:  # would end the loop's thread
            raise plain_exception(error) from error


class _Stepped:
    def __init__(self, call: _Call) -> None:
        self.call = call

    def __await__(self) -> Generator[Any, Any, Any]:
        thread = self.call.thread
        thread.running = self.call
        try:
            coroutine = self.call.make()
        finally:
            thread.running = None
        step, value = coroutine.send, None
        while True:
            thread.running = self.call
            try:
                waiting_for = step(value)
            except StopIteration as finished:
                return finished.value
            finally:
                thread.running = None
            try:
                value = yield waiting_for
                step = coroutine.send
            except BaseException as error:  # a cancellation, handed on to the coroutine
                step, value = coroutine.throw, error  # type: ignore[assignment]
