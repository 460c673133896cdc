"""The processes below this one, and their end. Reads /proc: elsewhere there are none to see."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from dataclasses import dataclass
from pathlib import Path

_TICK_S = 0.05


@dataclass(frozen=True)
class ProcessId:
    """A process by its number and its start time, so that another one with the same number is not taken for it."""

    pid: int
    started: int  # clock ticks since boot


def descendants() -> list[ProcessId]:
    """Every live process below this one."""
    children: dict[int, list[ProcessId]] = {}
    for entry in Path("/proc").iterdir() if Path("/proc").is_dir() else ():
        if entry.name.isdigit() and (found := _look_at(int(entry.name))) is not None:
            children.setdefault(found[1], []).append(found[0])
    below, ahead = [], [os.getpid()]
    while ahead:
        for child in children.get(ahead.pop(), ()):
            below.append(child)
            ahead.append(child.pid)
    return below


def end(processes: list[ProcessId], grace_s: float) -> None:
    """Return when all have ended; those that have not by `grace_s` are killed."""
    deadline = time.monotonic() + grace_s
    while (left := [p for p in processes if _is_alive(p)]) and time.monotonic() < deadline:
        time.sleep(_TICK_S)
    for process in left:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(process.pid, signal.SIGKILL)
    deadline = time.monotonic() + grace_s
    while any(map(_is_alive, left)) and time.monotonic() < deadline:
        time.sleep(_TICK_S)


def _is_alive(process: ProcessId) -> bool:
    found = _look_at(process.pid)
    return found is not None and found[0] == process


def _look_at(pid: int) -> tuple[ProcessId, int] | None:
    """A process and its parent's number; None when it has ended, whether or not somebody has waited for it."""
    try:
        state, parent, *rest = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (OSError, ValueError):
        return None
    return None if state in "ZX" else (ProcessId(pid, int(rest[17])), int(parent))
