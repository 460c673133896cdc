"""The launcher: one command on every node; the head's exit code is the driver's."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Sequence

from miles.launch import driver as drivers
from miles.launch.environment import run_environment
from miles.launch.node import RayNode, is_open, own_address
from miles.launch.options import DEFAULT_PORT, LaunchError, Options, parse

EXIT_BAD_ARGUMENTS, EXIT_INTERRUPTED = 2, 130
_HEAD_GONE_AFTER = 3  # looks in a row
_LOOK_S = 2.0


def main(argv: Sequence[str] | None = None, description: str | None = None) -> int:
    """Launch. Returns the driver's exit code (see `miles.ray.driver_main`); 2 for options that cannot work, 1 if Ray fails."""
    try:
        options = parse(argv, description)
    except LaunchError as error:
        print(f"launch: {error}", file=sys.stderr)
        return EXIT_BAD_ARGUMENTS
    stop = threading.Event()
    for signum in (signal.SIGINT, signal.SIGTERM):
        signal.signal(signum, lambda *_: _told(stop))
    try:
        return _launch(options, stop)
    except LaunchError as error:
        print(f"launch: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED


def _told(stop: threading.Event) -> None:
    if stop.is_set():
        raise KeyboardInterrupt  # a second time: do not wait for anybody
    stop.set()


def _launch(options: Options, stop: threading.Event) -> int:
    head = options.head or own_address()
    env = run_environment(options.driver_flags, head, options.env)
    command = [sys.executable, options.driver, *_driver_flags(options)]
    if options.dry_run:
        where = options.address or f"{head}:{options.port or DEFAULT_PORT}"
        # The plan is of a run in a cluster: the devices need not be here.
        return drivers.dry_run(command, env | {"RAY_ADDRESS": where}) if options.node_rank == 0 else 0
    if options.address:
        if options.submit == "job":
            return drivers.wait(drivers.Job(options.address, _remote(command), env), lambda: True, stop)
        # The cluster's nodes were started by somebody else: the driver passes the environment on to its actors.
        joined = env | {"RAY_ADDRESS": options.address, "MILES_FORWARD_ENV": ",".join(sorted(env))}
        return drivers.wait(drivers.Process(command, os.environ | joined), lambda: True, stop)
    with RayNode(options, env) as node:
        if not node.is_head:
            return _serve(node, stop)
        print(f"Ray is up at {node.address}", flush=True)
        driver: drivers.Driver
        if node.dashboard is not None:
            driver = drivers.Job(node.dashboard, command, env | {"RAY_ADDRESS": node.address})
        else:
            driver = drivers.Process(command, os.environ | env | {"RAY_ADDRESS": node.address})
        try:
            return drivers.wait(driver, node.alive, stop)
        except BaseException:
            driver.kill()
            raise


def _driver_flags(options: Options) -> list[str]:
    # Nodes come one after the other. First, so that the user's own value wins.
    patience = [f"--cluster-wait-timeout={options.wait_timeout:g}"] if options.num_nodes > 1 else []
    return [*patience, *options.driver_flags]


def _remote(command: list[str]) -> list[str]:
    """For a job server elsewhere: its own interpreter."""
    return ["python3", *command[1:]]


def _serve(node: RayNode, stop: threading.Event) -> int:
    """A further node lends its devices until the head is gone, which is how a run ends."""
    print(f"node {node.options.node_rank} joined {node.address}", flush=True)
    missed = 0
    while not stop.wait(_LOOK_S):
        if not node.alive():
            if not is_open(node.address):
                break
            raise LaunchError(f"Ray on {node.host} has ended. Its last lines:\n{node.last_lines()}")
        missed = 0 if is_open(node.address) else missed + 1
        if missed >= _HEAD_GONE_AFTER:
            break
    else:
        return EXIT_INTERRUPTED
    print(f"the head at {node.address} is gone: this node ends too", flush=True)
    return 0
