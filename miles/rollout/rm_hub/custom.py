"""Reward functions of users, by import path: async or not, for one sample or for a list, each bounded in time."""

from __future__ import annotations

import asyncio
import contextvars
import inspect
import threading
from collections.abc import Callable
from typing import Any

from miles.rollout.rm_hub.failures import REWARD_ERROR, REWARD_TIMEOUT, RewardFailure
from miles.rollout.rm_hub.timing import within
from miles.utils.imports import load_function

_MAX_THREADS = 32


async def call_custom(path: str, args: Any, target: Any, who: str, kwargs: dict[str, Any]) -> Any:
    """What the function at `path` returns for `target`, a sample or a list of samples.

    Raises: RewardFailure: reward_error with the exception that it raised, or reward_timeout after `--reward-timeout`
        seconds counted from its start.
    """
    function = load_function(path)
    timeout_s = args.reward_timeout
    try:
        if _is_async(function):
            value = await within(function(args, target, **kwargs), timeout_s)
        else:
            value = await _call_in_thread(function, args, target, kwargs, timeout_s)
            if inspect.isawaitable(value):
                value = await within(value, timeout_s)
        return value
    except TimeoutError as error:
        if isinstance(error, _TooLate) or not str(error):
            raise RewardFailure(
                REWARD_TIMEOUT, f"{who} did not answer within {timeout_s:g} s (--reward-timeout)"
            ) from None
        raise RewardFailure(REWARD_ERROR, f"{who} raised {type(error).__name__}: {error}") from error
    except RewardFailure:
        raise
    except Exception as error:
        raise RewardFailure(REWARD_ERROR, f"{who} raised {type(error).__name__}: {error}") from error


def _is_async(function: Callable) -> bool:
    if inspect.isfunction(function) or inspect.ismethod(function):
        return inspect.iscoroutinefunction(function)
    return inspect.iscoroutinefunction(type(function).__call__)  # an object that can be called


class _TooLate(TimeoutError):
    """The deadline of `_call_in_thread`, as opposed to a TimeoutError of the function's own."""


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
                error = caught if isinstance(caught, Exception) else RuntimeError(f"{type(caught).__name__}: {caught}")
            if not loop.is_closed():
                loop.call_soon_threadsafe(settle, value, error)

        context = contextvars.copy_context()
        threading.Thread(target=run, name="reward", daemon=True).start()
        done = asyncio.shield(outcome)
        try:
            return await within(done, timeout_s)
        except TimeoutError as error:
            if outcome.done() and not outcome.cancelled() and outcome.exception() is error:
                raise
            outcome.cancel()
            raise _TooLate from None
