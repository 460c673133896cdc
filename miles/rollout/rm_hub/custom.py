"""Reward functions of users, by import path: async or not, for one sample or for a list, each bounded in time."""

from __future__ import annotations

import asyncio
import contextvars
import inspect
import threading
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from miles.rollout.rm_hub.failures import REWARD_ERROR, REWARD_TIMEOUT, RewardFailure
from miles.rollout.rm_hub.reward_loop import RewardBlocked, RewardLoop, plain_exception
from miles.rollout.rm_hub.timing import TooLate, within
from miles.utils.imports import load_function

_MAX_THREADS = 32
reward_loop = RewardLoop()


async def call_custom(path: str, args: Any, target: Any, who: str, kwargs: dict[str, Any]) -> Any:
    """What the function at `path` returns for `target`, a sample or a list of samples.

    Raises: RewardFailure: reward_error with the exception that it raised, or reward_timeout after `--reward-timeout`
        seconds counted from its start.
    """
    function = load_function(path)
    try:
        if _is_async(function):
            return await reward_loop.run(lambda: function(args, target, **kwargs), args.reward_timeout)
        value = await _call_in_thread(function, args, target, kwargs, args.reward_timeout)
        if inspect.iscoroutine(value):  # a plain function that returns a coroutine, such as functools.partial gives
            return await reward_loop.run(lambda: value, args.reward_timeout)
        return value
    except RewardFailure:
        raise
    except Exception as error:
        raise _as_failure(error, function, who, args.reward_timeout) from error


def _as_failure(error: Exception, function: Callable, who: str, timeout_s: float) -> RewardFailure:
    if isinstance(error, RewardBlocked):
        why = "blocked its event loop instead of awaiting; blocking work belongs into a plain function, or asyncio.to_thread"
        return RewardFailure(
            REWARD_TIMEOUT, f"{who} did not answer within {timeout_s:g} s (--reward-timeout): it {why}", permanent=True
        )
    if isinstance(error, TooLate):
        return RewardFailure(REWARD_TIMEOUT, f"{who} did not answer within {timeout_s:g} s (--reward-timeout)")
    return RewardFailure(REWARD_ERROR, f"{who} raised {type(error).__name__}: {error}{_place(error, function)}")


def _place(error: Exception, function: Callable) -> str:
    """` (rewards.py line 7, in parse)`: the last line of the user's own file on the way to the error."""
    code = getattr(inspect.unwrap(function), "__code__", None)
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if code is not None and frame.filename == code.co_filename] or frames[-1:]
    return f" ({Path(own[-1].filename).name} line {own[-1].lineno}, in {own[-1].name})" if own else ""


def _is_async(function: Callable) -> bool:
    if inspect.iscoroutinefunction(function):
        return True
    return not inspect.isclass(function) and inspect.iscoroutinefunction(type(function).__call__)


_slots: dict[asyncio.AbstractEventLoop, asyncio.Semaphore] = {}


def _slot() -> asyncio.Semaphore:
    loop = asyncio.get_running_loop()
    for old in [known for known in _slots if known.is_closed()]:
        del _slots[old]
    return _slots.setdefault(loop, asyncio.Semaphore(_MAX_THREADS))


async def _call_in_thread(function: Callable, args: Any, target: Any, kwargs: dict[str, Any], timeout_s: float) -> Any:
    """Call a plain function in a thread of its own, so that it blocks nothing; its time counts from when it runs.

    A function that never returns keeps its thread; a daemon, so that it does not keep the process.
    """
    loop = asyncio.get_running_loop()
    async with _slot():
        outcome: asyncio.Future = loop.create_future()

        def settle(value: Any, error: BaseException | None) -> None:
            if not outcome.done():
                outcome.set_result(value) if error is None else outcome.set_exception(error)

        def run() -> None:
            value, error = None, None
            try:
                value = context.run(function, args, target, **kwargs)
            except BaseException as caught:
                error = plain_exception(caught)
            if not loop.is_closed():
                loop.call_soon_threadsafe(settle, value, error)

        context = contextvars.copy_context()
        threading.Thread(target=run, name="reward", daemon=True).start()
        return await within(outcome, timeout_s)
