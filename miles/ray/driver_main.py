"""What both drivers share around their loop: arguments, the plan, signals, exit codes."""

from __future__ import annotations

import asyncio
import logging
import re
import signal
import sys
import traceback
from collections.abc import Awaitable, Callable
from typing import Any

logger = logging.getLogger(__name__)

EXIT_FAILURE, EXIT_NOTHING_TO_DO, EXIT_INTERRUPTED = 1, 3, 130


def main(train: Callable[[Any], Awaitable[None]], driver: str, argv: list[str] | None = None) -> int:
    """Parse, show the plan, run `train(args)`, and turn what happens into an exit code.

    0 done; 1 failed (the cause on stderr); 2 bad arguments; 3 nothing left to do; 130 interrupted.
    """
    from miles.arguments import parse_args
    from miles.arguments.plan import build_plan, render_plan, write_plan

    args = parse_args(argv, driver=driver)
    plan = build_plan(args)
    if args.dry_run:
        render_plan(plan)
        return 0
    write_plan(plan, args)
    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    return asyncio.run(_supervise(train, args))


async def _supervise(train: Callable[[Any], Awaitable[None]], args: Any) -> int:
    from miles.ray.cluster import NothingToDo

    task = asyncio.ensure_future(train(args))
    loop = asyncio.get_running_loop()
    for signum in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(signum, task.cancel)
    try:
        await task
    except asyncio.CancelledError:
        print("interrupted: every process of this run has ended", file=sys.stderr)
        return EXIT_INTERRUPTED
    except NothingToDo as error:
        print(f"miles: {error}", file=sys.stderr)
        return EXIT_NOTHING_TO_DO
    except Exception as error:
        print(_explain(error), file=sys.stderr)
        print(f"\nmiles: the run failed; its logs are in {args.run_dir}/logs", file=sys.stderr)
        return EXIT_FAILURE
    return 0


def _explain(error: Exception) -> str:
    """A remote failure's own message, else the traceback here."""
    import ray

    if isinstance(error, ray.exceptions.RayTaskError):
        return "miles: " + re.sub(r"\x1b\[[0-9;]*m", "", str(error))
    if type(error).__module__.startswith("miles."):
        return f"miles: {type(error).__name__}: {error}"
    return "".join(traceback.format_exception(error))
