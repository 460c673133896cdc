"""Deadlines that an event loop's own delays do not eat up."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import TypeVar

T = TypeVar("T")
_TICKS = 20


class TooLate(TimeoutError):
    """The deadline of `within`, as opposed to a TimeoutError of the work's own."""


async def within(work: Awaitable[T], timeout_s: float) -> T:
    """Await `work` for at most `timeout_s` seconds during which this loop was responsive.

    A wall-clock timeout also counts the time in which the loop ran something else, and so times out work that was
    finished or never got its turn. Here time is counted in short sleeps, each for what it asked and not for what it took.
    Raises: TooLate, after cancelling the work.
    """
    task = asyncio.ensure_future(work)
    tick = min(1.0, timeout_s / _TICKS)
    try:
        for _ in range(max(1, round(timeout_s / tick))):
            done, _ = await asyncio.wait({task}, timeout=tick)
            if done:
                return task.result()
        await asyncio.sleep(0)
        if task.done():
            return task.result()
        raise TooLate
    finally:
        if not task.done():
            task.cancel()
