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

EXIT_FAILURE, EXIT_BAD_ARGUMENTS, EXIT_NOTHING_TO_DO, EXIT_INTERRUPTED = 1, 2, 3, 130


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
    try:
        write_plan(plan, args)
    except OSError as error:
        print(f"miles: --run-dir {args.run_dir} cannot be written: {error}. Choose another folder.", file=sys.stderr)
        return EXIT_BAD_ARGUMENTS
    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    return asyncio.run(_supervise(train, args))


async def _supervise(train: Callable[[Any], Awaitable[None]], args: Any) -> int:
    from miles.ray.cluster import NothingToDo
    from miles.utils.process_logging import log_path

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
        with open(log_path(args.run_dir, "driver"), "a") as log:
            log.write("".join(traceback.format_exception(error)))
        print(_explain(error), file=sys.stderr)
        print(f"\nmiles: the run failed; its logs are in {args.run_dir}/logs", file=sys.stderr)
        return EXIT_FAILURE
    return 0


def _explain(error: Exception) -> str:
    """An error of ours by its message, wherever it was raised; anything else with its traceback."""
    import ray

    cause = error.cause if isinstance(error, ray.exceptions.RayTaskError) else error
    if type(cause).__module__.startswith("miles."):
        return f"miles: {type(cause).__name__}: {cause}"
    if isinstance(error, ray.exceptions.RayTaskError):
        return "miles: " + re.sub(r"\x1b\[[0-9;]*m", "", str(error))
    return "".join(traceback.format_exception(error))
