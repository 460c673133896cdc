"""Processes below this one end with it, however deep they are and whatever they ignore."""

import os
import subprocess
import sys
import time

import pytest

from miles.utils.process_tree import ProcessId, descendants, end

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")

# A child that ignores SIGTERM, started by a parent that ends at once: nobody but init is above it then.
STUBBORN = (
    "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('up', flush=True); time.sleep(600)"
)
PARENT = f"import subprocess, sys; subprocess.Popen([sys.executable, '-c', {STUBBORN!r}]); sys.stdin.read()"


def is_running(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat") as f:
            return f.read().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_a_grandchild_that_outlives_its_parent_is_ended():
    before = set(descendants())
    parent = subprocess.Popen([sys.executable, "-c", PARENT], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert parent.stdout.readline() == "up\n"
    found = [p for p in descendants() if p not in before]
    assert parent.pid in {p.pid for p in found} and len(found) == 2
    parent.stdin.close()
    parent.wait(20)
    (grandchild,) = [p for p in found if p.pid != parent.pid]
    assert is_running(grandchild.pid)
    end(found, grace_s=0.2)
    assert not is_running(grandchild.pid)


def test_those_that_end_by_themselves_are_waited_for_and_not_killed():
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(0.5)"])
    started = time.monotonic()
    end([p for p in descendants() if p.pid == child.pid], grace_s=20)
    assert time.monotonic() - started < 15 and child.wait(5) == 0


def test_another_process_with_the_same_number_is_left_alone():
    end([ProcessId(os.getpid(), started=0)], grace_s=0.2)
