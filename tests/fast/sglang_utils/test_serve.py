"""However a server ends, nothing that it started is left, nor its temporary files. The server here is a made-up one."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from miles.backends.sglang_utils import launch as launch_module
from miles.utils.process import hold_port, spawn, terminate

SERVE = Path(launch_module.__file__).parent / "inside" / "serve.py"

# Starts two processes as SGLang does, by multiprocessing's spawn, which do not notice their parent's end.
SERVER = textwrap.dedent(
    """
    import multiprocessing, os, signal, socket, sys, tempfile, time
    from sglang.work import work

    if __name__ == "__main__":
        for _ in range(2):
            multiprocessing.get_context("spawn").Process(target=work).start()
        tempfile.NamedTemporaryFile(delete=False)
        listener = socket.create_server(("127.0.0.1", int(sys.argv[1])))
        print("serving", flush=True)
        if sys.argv[2] == "crash":
            os._exit(1)
        if sys.argv[2] == "stubborn":
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
        while True:
            time.sleep(1)
    """
)
WORK = "import signal, time\ndef work():\n    signal.signal(signal.SIGTERM, signal.SIG_IGN)\n    time.sleep(600)\n"


@pytest.fixture
def server(tmp_path):
    package = tmp_path / "packages" / "sglang"
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    (package / "launch_server.py").write_text(SERVER)
    (package / "work.py").write_text(WORK)
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    env = os.environ | {"PYTHONPATH": str(package.parent), "MILES_SGLANG_SCRATCH": str(scratch)}
    started: list[subprocess.Popen] = []

    def start(how: str) -> subprocess.Popen:
        with hold_port() as held:
            options = ["--hold", str(held.fileno()), "--", str(held.getsockname()[1]), how]
            process = spawn(
                [sys.executable, str(SERVE), *options], log_path=tmp_path / "log", env=env, pass_fds=[held.fileno()]
            )
        started.append(process)
        wait_for(lambda: "serving" in (tmp_path / "log").read_text(), "the server")
        return process

    yield start
    for process in started:
        terminate(process, grace_s=0.1)


def members(group: int) -> list[str]:
    """Command lines of the live processes of a process group."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                state, _, pgrp = (entry / "stat").read_text().rsplit(")", 1)[1].split()[:3]
                if int(pgrp) == group and state not in "ZX":
                    found.append((entry / "cmdline").read_text().replace("\0", " "))
            except (OSError, IndexError):
                continue
    return found


def wait_for(condition, what: str, timeout_s: float = 20) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"{what} did not come within {timeout_s} s"
        time.sleep(0.02)


@pytest.mark.parametrize("how", ["serve", "crash", "stubborn"])
def test_nothing_is_left_whatever_the_end(server, how, tmp_path):
    process = server(how)
    if how == "serve":
        process.kill()
    elif how == "stubborn":
        os.killpg(process.pid, signal.SIGTERM)
    code = process.wait(10)
    assert code == (1 if how == "crash" else -signal.SIGKILL)
    wait_for(lambda: members(process.pid) == [], "the end of every process")
    assert not (tmp_path / "scratch").exists()


def test_children_are_gone_when_the_process_that_started_the_server_dies(server, tmp_path):
    process = server("serve")
    assert len(members(process.pid)) >= 4, "server, guard and two children"
    os.kill(process.pid, signal.SIGKILL)  # as the kernel does, by the death signal
    wait_for(lambda: members(process.pid) == [], "the end of every process")


def test_a_held_port_is_given_to_nobody_else_but_a_server_may_listen_on_it():
    with hold_port() as held:
        port = held.getsockname()[1]
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", port), timeout=1)
        with socket.create_server(("127.0.0.1", port)), pytest.raises(OSError, match=f"port {port} on 127.0.0.1"):
            hold_port(port=port)
