"""Where the time goes between the start of the process and the first step."""

from __future__ import annotations

import os
import time
from pathlib import Path


def process_start() -> float:
    """When this process was started, on the clock of `time.monotonic`. Linux counts it in ticks since boot."""
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    age = time.clock_gettime(time.CLOCK_BOOTTIME) - int(fields[19]) / os.sysconf("SC_CLK_TCK")
    return time.monotonic() - age


class Laps:
    """Seconds of stages that follow each other, and their sum under `total`."""

    def __init__(self, since: float) -> None:
        self._start = self._last = since
        self.seconds: dict[str, float] = {}

    def lap(self, name: str) -> None:
        """The stage `name` has ended, and the next begins."""
        now = time.monotonic()
        self.seconds[name] = now - self._last
        self._last = now

    def take(self) -> dict[str, float]:
        """The stages so far and `total`; afterwards there are none."""
        seconds, self.seconds = self.seconds, {}
        return seconds | {"total": self._last - self._start}
