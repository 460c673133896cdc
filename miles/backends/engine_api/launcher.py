"""Engine processes: what a launcher returns, how one is chosen, and how to wait until the server is ready."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from miles.backends.engine_api.client import EngineClient, EngineError
from miles.backends.engine_api.errors import EngineRejected, EngineStartError
from miles.utils.imports import load_function
from miles.utils.process import tail

_LAUNCHERS = {
    "embedded": "miles.backends.embedded_engine.launch.launch",
    "sglang": "miles.backends.sglang_utils.launch.launch",
}
_PROBE_TIMEOUT_S = 10.0
_TICK_S = 0.05


@dataclass
class EngineProcess:
    """A started engine server: its process, base url, and the file its output goes to."""

    process: subprocess.Popen
    url: str
    log_path: Path


class EngineLaunch(Protocol):
    """Starts an engine server and returns at once. `port` 0 takes any free one; `gpu_ids` None leaves the choice to Ray."""

    def __call__(
        self,
        args: Any,
        *,
        index: int,
        host: str,
        port: int,
        admin_key: str,
        model_path: str,
        log_path: Path,
        weight_version: int,
        gpu_ids: list[int] | None = None,
    ) -> EngineProcess: ...


def load_launcher(name: str) -> EngineLaunch:
    """The launcher of `--rollout-engine`: `embedded`, `sglang`, or an import path to an `EngineLaunch`."""
    launch: Callable = load_function(_LAUNCHERS.get(name, name))
    return launch


async def wait_ready(client: EngineClient, engine: EngineProcess, timeout_s: float) -> None:
    """Return when the server answers its health check with 200.

    However slowly it starts, it is left alone until `timeout_s`. Raises EngineStartError with the log's last lines: at
    once when the process ends, or when the deadline passes.
    """
    deadline = time.monotonic() + timeout_s
    last = "it never answered"
    while time.monotonic() < deadline:
        probe = asyncio.create_task(
            client.health(timeout_s=min(_PROBE_TIMEOUT_S, max(deadline - time.monotonic(), 0.1)))
        )
        # A dead server's inherited socket may still accept connections, so the process is watched beside the probe.
        while not probe.done():
            await asyncio.wait([probe], timeout=_TICK_S)
            if engine.process.poll() is not None:
                probe.cancel()
                await asyncio.gather(probe, return_exceptions=True)
                raise _died(engine)
        error = probe.exception()
        if error is None:
            return
        if isinstance(error, EngineRejected) and error.status in (401, 403):
            raise error
        if not isinstance(error, EngineError):
            raise error
        last = str(error)
        await asyncio.sleep(_TICK_S)
    raise EngineStartError(
        f"engine at {engine.url} (pid {engine.process.pid}) was not ready within {timeout_s:g} s (--engine-start-timeout); "
        f"last answer: {last}\n{_log_lines(engine)}"
    )


def _died(engine: EngineProcess) -> EngineStartError:
    code = engine.process.returncode
    how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
    return EngineStartError(
        f"engine process {engine.process.pid} {how} before it was ready at {engine.url}\n{_log_lines(engine)}"
    )


def _log_lines(engine: EngineProcess) -> str:
    return f"last lines of {engine.log_path}:\n{tail(engine.log_path) or '(nothing was logged)'}"
