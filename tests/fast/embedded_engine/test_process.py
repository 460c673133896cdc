"""The server as a process: its command line, its faults, its end."""

from __future__ import annotations

import signal
import subprocess
import sys
import time

import pytest

from miles.backends.embedded_engine.faults import FAULTS, Faults
from miles.backends.engine_api.errors import EngineError, EngineFailed, EngineTimeout
from miles.utils.process import reserve_port, tail, terminate
from tests.fast.embedded_engine.conftest import prompt, start_server

COMMAND = [sys.executable, "-m", "miles.backends.embedded_engine.server"]
PAYLOAD = {"input_ids": prompt(9), "sampling_params": {"max_new_tokens": 200, "ignore_eos": True}}


def test_faults_strike_and_sigterm_ends_within_two_seconds(tmp_path, model_dirs):
    server = start_server(
        model_dirs["qwen3"], tmp_path / "log", "http_503_times=1", "drop_tensor=model.norm.weight", "slow_start_s=1"
    )
    try:
        assert "embedded engine ready at http://127.0.0.1:" in tail(tmp_path / "log")
        with pytest.raises(EngineFailed, match="injected"):
            server.call("generate", PAYLOAD)
        assert len(server.call("generate", PAYLOAD)["output_ids"]) == 200
        server.process.process.send_signal(signal.SIGTERM)
        started = time.monotonic()
        assert server.process.process.wait(10) == 0
        assert time.monotonic() - started < 2.5
    finally:
        terminate(server.process.process)


def test_dying_in_mid_request_is_seen_by_the_caller(tmp_path, model_dirs):
    server = start_server(model_dirs["qwen3"], tmp_path / "log", "die_after_n_tokens=50")
    try:
        with pytest.raises(EngineError):
            server.call("generate", PAYLOAD)
        assert server.process.process.wait(10) == 13
    finally:
        terminate(server.process.process)


def test_hanging_in_an_update_meets_the_callers_deadline(tmp_path, model_dirs):
    server = start_server(model_dirs["qwen3"], tmp_path / "log", "hang_on_update")
    try:
        with pytest.raises(EngineTimeout):
            server.call("update_weights_from_disk", str(server.model_path), timeout_s=1.0)
    finally:
        terminate(server.process.process)


def test_unknown_faults_are_answered_with_the_known_ones():
    with pytest.raises(ValueError) as error:
        Faults.parse(["explode"])
    assert all(name in str(error.value) for name in FAULTS)
    with pytest.raises(ValueError):
        Faults.parse(["die_after_n_tokens=soon"])


@pytest.mark.parametrize(
    "options, word",
    [
        (["--model-path", "/nowhere"], "is not a directory"),
        (["--model-path", "MODEL", "--max-running-requests", "0"], "must be at least 1"),
        (["--model-path", "MODEL", "--fault", "explode"], "is not one of"),
    ],
)
def test_bad_options_end_with_one_line(options, word, model_dirs):
    options = [str(model_dirs["qwen3"]) if o == "MODEL" else o for o in options]
    done = subprocess.run([*COMMAND, *options, "--port", "0"], capture_output=True, text=True, timeout=120)
    assert done.returncode == 2 and word in done.stderr and "Traceback" not in done.stderr


def test_a_port_in_use_is_named(model_dirs):
    with reserve_port() as taken:
        port = taken.getsockname()[1]
        done = subprocess.run(
            [*COMMAND, "--model-path", str(model_dirs["qwen3"]), "--port", str(port)],
            capture_output=True,
            text=True,
            timeout=120,
        )
    assert done.returncode == 2 and f"port {port}" in done.stderr
