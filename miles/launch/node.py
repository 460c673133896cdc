"""This node's part of a Ray cluster: started for one run, ended with it, apart from any other cluster on the host."""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path

from miles.launch.options import DEFAULT_PORT, LaunchError, Options
from miles.utils.process import hold_port, spawn, tail, terminate
from miles.utils.process_tree import descendants, end

_START_TIMEOUT_S = 90.0
_ATTEMPTS = 3
_TICK_S = 0.1
_GRACE_S = 10.0


class RayNode:
    """A `ray start --block` process. Use as a context: all that it started has ended when the block is left."""

    def __init__(self, options: Options, environment: Mapping[str, str]) -> None:
        self.options, self.environment = options, environment
        self.is_head = options.node_rank == 0
        self.host = (options.head if self.is_head else None) or own_address(options.head)
        self._scratch = Path(tempfile.mkdtemp(prefix="miles-ray-", dir="/tmp"))  # short: sockets' paths have a limit
        self.log = self._scratch / "ray-start.log"
        self._process: subprocess.Popen | None = None
        self._before = set(descendants())
        self.dashboard: str | None = None
        self.address = ""

    def __enter__(self) -> RayNode:
        try:
            for attempt in range(_ATTEMPTS):
                with contextlib.ExitStack() as held:  # ports, until Ray listens on them
                    self._start(held)
                    problem = self._wait()
                if problem is None:
                    return self
                self._end()
                if attempt + 1 < _ATTEMPTS:
                    # Ray gives itself 30 s, which a busy host may not keep to, and which the head may be late for.
                    print(f"Ray on {self.host} {problem}; it is started again", file=sys.stderr, flush=True)
            raise LaunchError(f"Ray on {self.host} {problem}. Its last lines:\n{self.last_lines()}")
        except BaseException:
            self.__exit__()
            raise

    def __exit__(self, *exc: object) -> None:
        self._end()
        shutil.rmtree(self._scratch, ignore_errors=True)

    def _end(self) -> None:
        if self._process is not None:
            started = [p for p in descendants() if p not in self._before]
            terminate(self._process, grace_s=_GRACE_S)
            end(started, _GRACE_S)
            self._process = None

    def alive(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def last_lines(self) -> str:
        return tail(self.log)

    def _start(self, held: contextlib.ExitStack) -> None:
        options = self.options
        words = [sys.executable, "-m", "ray.scripts.scripts", "start", "--block", "--disable-usage-stats"]
        words += [f"--node-ip-address={self.host}"]
        words += [f"--{name}={n}" for name, n in self._sizes().items()]
        if not self.is_head:
            self.address = f"{options.head}:{options.port or DEFAULT_PORT}"
            wait_for_port(self.address, options.wait_timeout)
            self._process = self._spawn([*words, f"--address={self.address}"])
            return
        # One node may share its host with others' clusters; several must know the port beforehand.
        port = options.port if options.port is not None else (DEFAULT_PORT if options.num_nodes > 1 else 0)
        port = held.enter_context(hold_port(self.host, port)).getsockname()[1]
        self.address = f"{self.host}:{port}"
        words += ["--head", f"--port={port}", f"--temp-dir={self._scratch}"]
        if options.submit == "job":
            dashboard = held.enter_context(hold_port("127.0.0.1")).getsockname()[1]
            self.dashboard = f"http://127.0.0.1:{dashboard}"
            words += ["--include-dashboard=true", "--dashboard-host=127.0.0.1", f"--dashboard-port={dashboard}"]
        else:
            words += ["--include-dashboard=false"]
        self._process = self._spawn(words)

    def _sizes(self) -> dict[str, int]:
        options = self.options
        sizes = {"num-gpus": options.num_gpus, "num-cpus": options.num_cpus}
        return {name: n for name, n in sizes.items() if n is not None}

    def _spawn(self, words: list[str]) -> subprocess.Popen:
        self.log.unlink(missing_ok=True)
        return spawn(words, log_path=self.log, env=os.environ | dict(self.environment))

    def _wait(self) -> str | None:
        """Until the node is part of a cluster: Ray says so and then blocks. Otherwise what happened instead."""
        deadline = time.monotonic() + _START_TIMEOUT_S
        while time.monotonic() < deadline:
            if not self.alive():
                return "ended before it was part of a cluster"
            if "Ray runtime started" in self.log.read_text(errors="replace"):
                return None
            time.sleep(_TICK_S)
        return f"did not start within {_START_TIMEOUT_S:g} s"


def own_address(towards: str | None = None) -> str:
    """This host's address on the way to `towards` (a host), or on its default route; loopback where there is none."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((towards or "10.255.255.255", 1))  # sends nothing
            return probe.getsockname()[0]
        except OSError:
            return "127.0.0.1"


def is_open(address: str, timeout_s: float = 2.0) -> bool:
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host, int(port)), timeout=timeout_s).close()
    except OSError:
        return False
    return True


def wait_for_port(address: str, timeout_s: float) -> None:
    deadline = time.monotonic() + timeout_s
    while not is_open(address):
        if time.monotonic() >= deadline:
            raise LaunchError(
                f"the head at {address} did not answer within {timeout_s:g} s: is node 0 started? (--head, --port)"
            )
        time.sleep(0.5)
