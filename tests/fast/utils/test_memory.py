"""What large blocks cost a process, which reads malloc's options when it starts."""

import os
import subprocess
import sys

import pytest

from miles.utils.memory import KEEP_FREED_MEMORY

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")

RESIDENT = """
import torch
import threading
from miles.utils.memory import lazy_zeros, return_freed_memory

def resident():  # MiB
    with open("/proc/self/statm") as f:
        return int(f.read().split()[1]) * 4096 >> 20

before = resident()
"""


def run(code):
    command, env = [sys.executable, "-c", RESIDENT + code], os.environ | KEEP_FREED_MEMORY
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, env=env)
    assert done.returncode == 0, done.stderr
    return [int(word) for word in done.stdout.split()]


def test_zeros_cost_what_is_used_of_them():
    used, left = run(
        "x = lazy_zeros((64, 1 << 20), torch.float32)\n"
        "assert x.shape == (64, 1 << 20) and not x[5, :1000].any()\n"
        "x[3] = 1.0\n"
        "used = resident() - before\n"
        "del x\n"
        "print(used, resident() - before)"
    )
    assert used < 16 and left < 8, "256 MiB, of which 4 were used"


def test_freed_blocks_stay_until_they_are_returned():
    kept, left = run(
        "thread = threading.Thread(target=lambda: torch.ones(64 << 18))\n"  # actors' and engines' work is in threads
        "thread.start(), thread.join()\n"
        "kept = resident() - before\n"
        "return_freed_memory()\n"
        "print(kept, resident() - before)"
    )
    assert kept >= 60 and left < 16, "64 MiB were allocated and freed"
