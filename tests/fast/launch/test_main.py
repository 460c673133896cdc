"""Waiting for a driver, and what a launcher does without a cluster of its own."""

from __future__ import annotations

import sys
import threading
import time

import pytest

from miles.launch import driver as drivers
from miles.launch.driver import Job, Process, wait
from miles.launch.main import main
from miles.launch.node import is_open, own_address, wait_for_port
from miles.launch.options import LaunchError
from miles.utils.process import reserve_port


def python(code: str) -> Process:
    return Process([sys.executable, "-c", code], {"PATH": "/usr/bin:/bin"})


def test_the_exit_code_comes_back_and_a_signal_as_shells_tell_it():
    assert wait(python("raise SystemExit(3)"), lambda: True, threading.Event()) == 3
    assert wait(python("import os; os.kill(os.getpid(), 9)"), lambda: True, threading.Event()) == 137


def test_an_interrupt_reaches_the_driver_once(monkeypatch):
    stop = threading.Event()
    stop.set()
    code = (
        "import signal, sys, time\n"
        "signal.signal(signal.SIGINT, lambda *_: sys.exit(130))\n"
        "print('ready', flush=True)\ntime.sleep(60)"
    )
    driver = python(code)
    time.sleep(0.5)
    assert wait(driver, lambda: True, stop) == 130


def test_a_driver_that_does_not_obey_is_killed(monkeypatch, capfd):
    monkeypatch.setattr(drivers, "_END_TIMEOUT_S", 0.5)
    stop = threading.Event()
    stop.set()
    driver = python("import signal, time\nfor s in (2, 15): signal.signal(s, signal.SIG_IGN)\ntime.sleep(60)")
    time.sleep(0.5)
    assert wait(driver, lambda: True, stop) == 130
    assert driver.poll() is not None and "is killed" in capfd.readouterr().err


def test_the_end_of_ray_is_told_not_waited_out():
    driver = python("import time; time.sleep(60)")
    try:
        with pytest.raises(LaunchError, match="has ended while the driver was running"):
            wait(driver, lambda: False, threading.Event())
    finally:
        driver.kill()


def test_bad_options_end_before_anything_starts(capsys):
    assert main(["--node-rank", "1"]) == 2
    assert "--node-rank 1 is not below --num-nodes 1" in capsys.readouterr().err


def test_a_head_that_does_not_answer_is_told_with_what_to_check():
    with reserve_port() as listener:
        port = listener.getsockname()[1]
        assert is_open(f"127.0.0.1:{port}")
        wait_for_port(f"127.0.0.1:{port}", 1)
    with pytest.raises(LaunchError, match=f"the head at 127.0.0.1:{port} did not answer within 0.1 s"):
        wait_for_port(f"127.0.0.1:{port}", 0.1)
    assert own_address("127.0.0.1") == "127.0.0.1"


def test_a_job_server_that_is_not_there_is_told():
    with pytest.raises(LaunchError, match=r"the job server at http://127.0.0.1:9 cannot be used.*ray\[default\]"):
        Job("http://127.0.0.1:9", ["true"], {})
