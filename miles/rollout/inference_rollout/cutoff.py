"""Cutting off the groups that a full batch no longer needs: abort on the engines, wait, collect what is there."""

from __future__ import annotations

import asyncio
import importlib
import logging
import time
from typing import Any

from miles.rollout.compat import call
from miles.rollout.failures import flatten
from miles.rollout.generate_state import GenerateState
from miles.utils.types import Group, Sample, SampleStatus

logger = logging.getLogger(__name__)

_REPEAT_ABORT_S = 1.0
_DEADLINE_S = 60.0


async def cut_off(state: GenerateState, tasks: dict[asyncio.Task, Group]) -> list[Group]:
    """Abort all requests in flight and wait until every task has ended. Empties `tasks`.

    The abort is repeated while tasks remain: a request may have been on its way when the first one arrived.
    After a minute what still runs is cancelled, and its samples start over.

    Returns: the groups, ready to be submitted again.
    """
    state.aborted = True
    await _abort_agents(state.args)
    deadline = time.monotonic() + _DEADLINE_S
    pending = set(tasks)
    while pending and time.monotonic() < deadline:
        try:
            await asyncio.wait_for(state.engines.abort_all(), _REPEAT_ABORT_S * 10)
        except Exception as error:
            logger.warning("aborting the rest of the batch: %s: %s", type(error).__name__, error)
        _, pending = await asyncio.wait(pending, timeout=_REPEAT_ABORT_S)
    for task in pending:
        task.cancel()
    if pending:
        logger.warning(
            "%d groups did not stop within %.0f s of the abort and were cancelled", len(pending), _DEADLINE_S
        )
        await asyncio.gather(*pending, return_exceptions=True)
    groups = [_resumable(task, group) for task, group in tasks.items()]
    tasks.clear()
    return groups


def _resumable(task: asyncio.Task, group: Group) -> Group:
    """The group as samples to submit again: finished and partial ones as they are, the rest from the start."""
    clean = not task.cancelled() and task.exception() is None
    results = task.result() if clean else []
    if not clean or len(flatten(results)) != len(group) or any(isinstance(entry, list) for entry in results):
        for sample in group:
            sample.reset_for_retry()
        return group
    samples: list[Sample] = results
    for sample in samples:
        if sample.status is SampleStatus.FAILED:
            sample.reset_for_retry()
    return samples


async def _abort_agents(args: Any) -> None:
    """Call `abort(args)` of the module that holds the agent function, where there is one."""
    path = getattr(args, "custom_agent_function_path", None)
    if not path:
        return
    abort = getattr(importlib.import_module(path.rpartition(".")[0]), "abort", None)
    if abort is None:
        return
    try:
        await asyncio.wait_for(call(abort, args), _DEADLINE_S)
    except Exception as error:
        logger.warning("the agent module's abort failed: %s: %s", type(error).__name__, error)
