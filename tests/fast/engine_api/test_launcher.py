"""When an engine counts as ready, and what is said when it never is."""

from __future__ import annotations

import os
import sys
import textwrap
import time

import pytest

from miles.backends.engine_api.client import EngineClient
from miles.backends.engine_api.errors import EngineRejected, EngineStartError
from miles.backends.engine_api.launcher import EngineProcess, load_launcher, wait_ready
from miles.utils.process import reserve_port, spawn, terminate

# Argument 1: inherited listening socket; then a mode. Answers /health with the statuses of argument 3, the last for ever.
SERVER = textwrap.dedent(
    """
    import socket, sys, time
    print("loading the model")
    if sys.argv[2] == "crash":
        time.sleep(0.2)
        sys.exit("out of memory in layer 3")
    listener = socket.socket(fileno=int(sys.argv[1]))
    time.sleep(1.0 if sys.argv[2] == "slow" else 0)
    if sys.argv[2] == "silent":
        time.sleep(60)
    statuses = sys.argv[3].split(",")
    while True:
        connection, _ = listener.accept()
        connection.recv(10000)
        status = statuses.pop(0) if len(statuses) > 1 else statuses[0]
        connection.sendall(f"HTTP/1.1 {status} x\\r\\nContent-Length: 0\\r\\nConnection: close\\r\\n\\r\\n".encode())
        connection.close()
    """
)


@pytest.fixture
def start(tmp_path):
    started = []

    def launch(mode: str = "serve", statuses: str = "200") -> EngineProcess:
        listener = reserve_port()
        command = [sys.executable, "-u", "-c", SERVER, str(listener.fileno()), mode, statuses]
        process = spawn(command, log_path=tmp_path / "engine.log", env=dict(os.environ), pass_fds=[listener.fileno()])
        # The parent keeps the socket, as a launcher may: connections succeed although nobody answers.
        started.append((process, listener))
        return EngineProcess(process, f"http://127.0.0.1:{listener.getsockname()[1]}", tmp_path / "engine.log")

    yield launch
    for process, listener in started:
        terminate(process, grace_s=0.1)
        listener.close()


async def ready(engine: EngineProcess, timeout_s: float = 20) -> None:
    async with EngineClient(engine.url) as client:
        await wait_ready(client, engine, timeout_s)


async def test_503_is_not_ready_and_is_waited_for(start):
    engine = start(statuses="503,503,200")
    await ready(engine)


async def test_a_server_that_is_slow_to_answer_is_left_alone(start):
    await ready(start("slow"))


async def test_a_process_that_dies_fails_at_once_with_its_last_lines(start):
    started = time.monotonic()
    with pytest.raises(EngineStartError, match=r"ended with exit code 1(.|\n)*out of memory in layer 3"):
        await ready(start("crash"), timeout_s=60)
    assert time.monotonic() - started < 10


async def test_a_killed_process_is_named_with_its_signal(start):
    engine = start("silent")
    engine.process.kill()
    with pytest.raises(EngineStartError, match=rf"engine process {engine.process.pid} was killed by SIGKILL"):
        await ready(engine)


async def test_the_deadline_names_its_flag_and_the_last_answer(start):
    engine = start(statuses="503")
    with pytest.raises(EngineStartError, match=r"within 1 s \(--engine-start-timeout\); last answer: .* 503") as raised:
        await ready(engine, timeout_s=1)
    assert "loading the model" in str(raised.value)


async def test_a_server_with_another_key_is_not_waited_for(start):
    with pytest.raises(EngineRejected, match="belongs to another run"):
        await ready(start(statuses="401"))


def test_launchers_are_chosen_by_name_or_import_path():
    assert load_launcher(f"{__name__}.my_launch") is my_launch
    with pytest.raises(ValueError, match="nothing"):
        load_launcher("nothing.launch")


def my_launch(args, **kwargs): ...
