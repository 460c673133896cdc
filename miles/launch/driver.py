"""The driver of a run: as a process of this node, or as a job of Ray's job server."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shlex
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from miles.launch.options import REPOSITORY, LaunchError
from miles.utils.process import spawn, terminate

_INTERRUPTED = 130
_END_TIMEOUT_S = 60.0  # a driver that was told to end has this long to end its processes
_POLL_S = 0.2


class Driver(Protocol):
    """A driver that runs. `poll` gives its exit code or None; `interrupt` tells it to end, `kill` ends it."""

    def poll(self) -> int | None: ...
    def interrupt(self) -> None: ...
    def kill(self) -> None: ...


class Process:
    """The driver as a child process; its output is ours."""

    def __init__(self, command: Sequence[str], env: Mapping[str, str]) -> None:
        # In a session of its own: Ctrl-C reaches it once, from us, and not the processes that it must end in order.
        self._child = spawn(command, log_path=None, env=dict(env))

    def poll(self) -> int | None:
        code = self._child.poll()
        return 128 - code if code is not None and code < 0 else code

    def interrupt(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            self._child.send_signal(signal.SIGINT)

    def kill(self) -> None:
        terminate(self._child, grace_s=0.5)


class Job:
    """The driver as a job of the server at `url`; its log is printed as it grows."""

    def __init__(self, url: str, command: Sequence[str], env: Mapping[str, str]) -> None:
        try:
            from ray.job_submission import JobSubmissionClient

            self._client: Any = JobSubmissionClient(url)
        except Exception as error:  # what it raises without ray[default], or without a server, is of many types
            raise LaunchError(
                f"the job server at {url} cannot be used: {str(error).splitlines()[0]} (--submit job needs "
                "`pip install 'ray[default]'` here and on the head)"
            ) from error
        entrypoint = f"cd {shlex.quote(str(REPOSITORY))} && exec {shlex.join(command)}"
        self._id = self._client.submit_job(entrypoint=entrypoint, runtime_env={"env_vars": dict(env)})
        print(f"submitted job {self._id} to {url}", flush=True)
        self._log = threading.Thread(target=self._print_log, daemon=True)
        self._log.start()

    def _print_log(self) -> None:
        async def follow() -> None:
            async for text in self._client.tail_job_logs(self._id):
                print(text, end="", flush=True)

        with contextlib.suppress(Exception):  # the server is gone: `poll` finds out
            asyncio.run(follow())

    def poll(self) -> int | None:
        info = self._client.get_job_info(self._id)
        if not info.status.is_terminal():
            return None
        self._log.join(5.0)
        if str(info.status) == "SUCCEEDED":
            return 0
        if str(info.status) == "STOPPED":
            return _INTERRUPTED
        if info.driver_exit_code is None:
            print(f"job {self._id}: {info.message}", file=sys.stderr)
        return info.driver_exit_code or 1

    def interrupt(self) -> None:
        with contextlib.suppress(Exception):
            self._client.stop_job(self._id)

    kill = interrupt


def wait(driver: Driver, cluster_lives: Any, stop: threading.Event) -> int:
    """The driver's exit code. `stop` is set by Ctrl-C or SIGTERM; `cluster_lives()` says whether Ray runs still."""
    told_at: float | None = None
    while True:
        code = driver.poll()
        if code is not None:
            return code
        if stop.is_set() and told_at is None:
            told_at = time.monotonic()
            driver.interrupt()
        if told_at is not None and time.monotonic() - told_at > _END_TIMEOUT_S:
            print(f"the driver did not end within {_END_TIMEOUT_S:g} s and is killed", file=sys.stderr)
            driver.kill()
            return _INTERRUPTED
        if told_at is None and not cluster_lives():
            raise LaunchError("this node's part of the Ray cluster has ended while the driver was running")
        time.sleep(_POLL_S)


def dry_run(command: Sequence[str], env: Mapping[str, str]) -> int:
    return subprocess.run(list(command), env=os.environ | dict(env), check=False).returncode
