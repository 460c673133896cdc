"""Faults on purpose: what tests and drills make an engine do wrong. Nothing here runs unless `--fault` asks for it."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass, field

FAULTS = {
    "ack_without_loading": "answer every weight update with success and load nothing",
    "drop_tensor=NAME": "answer with success, but never load this tensor",
    "corrupt_tensor=NAME": "load this tensor with its first element changed",
    "hang_on_update": "never answer a weight update",
    "die_after_n_tokens=N": "exit with code 13 once N tokens were generated",
    "die_on_update": "exit with code 13 when a weight update arrives",
    "hang_after_n_tokens=N": "stop generating, without dying, once N tokens were generated",
    "slow_start_s=S": "answer 503 to health checks for S seconds",
    "http_500_once": "fail the first /generate with 500",
    "http_503_times=N": "fail the first N /generate calls with 503",
    "step_delay_s=S": "take S seconds longer for every step",
}
_NAMES = {name.partition("=")[0]: "=" in name for name in FAULTS}


@dataclass
class Faults:
    """The faults of one server, and how often each has struck."""

    wanted: dict[str, str] = field(default_factory=dict)
    started: float = field(default_factory=time.monotonic)
    failed_requests: int = 0

    @classmethod
    def parse(cls, options: list[str]) -> Faults:
        """From `--fault name` and `--fault name=value`. Raises: ValueError listing the faults there are."""
        wanted: dict[str, str] = {}
        for option in options:
            name, equals, value = option.partition("=")
            if name not in _NAMES or bool(equals) != _NAMES[name]:
                known = "\n  ".join(f"{n}: {help_}" for n, help_ in FAULTS.items())
                raise ValueError(f"--fault {option!r} is not one of\n  {known}")
            if name.endswith(("_s", "_n_tokens", "_times")):
                float(value)
            wanted[name] = value
        return cls(wanted)

    def number(self, name: str) -> float | None:
        return float(self.wanted[name]) if name in self.wanted else None

    @property
    def still_starting(self) -> bool:
        delay = self.number("slow_start_s")
        return delay is not None and time.monotonic() - self.started < delay

    def request_status(self) -> int | None:
        """The error that the next /generate gets, if any."""
        times = 1 if "http_500_once" in self.wanted else int(self.number("http_503_times") or 0)
        if self.failed_requests >= times:
            return None
        self.failed_requests += 1
        return 500 if "http_500_once" in self.wanted else 503

    def after_step(self, generated_tokens: int) -> None:
        """Called by the engine thread between steps."""
        limit = self.number("die_after_n_tokens")
        if limit is not None and generated_tokens >= limit:
            os._exit(13)
        limit = self.number("hang_after_n_tokens")
        while limit is not None and generated_tokens >= limit:
            time.sleep(3600)
        if (delay := self.number("step_delay_s")) is not None:
            time.sleep(delay)

    def on_update(self) -> None:
        """Called in the engine thread, at the moment a weight update would be loaded."""
        if "die_on_update" in self.wanted:
            os._exit(13)
        while "hang_on_update" in self.wanted:
            time.sleep(3600)
