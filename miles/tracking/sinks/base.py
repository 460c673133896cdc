"""What a sink is."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any


class SinkError(RuntimeError):
    """A sink that cannot be opened; the message says why and what to set."""


class Sink(ABC):
    """Takes rows of metrics. `log` may raise: the tracker counts that and goes on."""

    name: str

    @abstractmethod
    def open(self, state: dict[str, Any], resumed_at: int | None) -> None:
        """Begin, or go on where `state` (of `state_dict`) left off; rows of rollouts from `resumed_at` on do not count
        any more. Called once, before any row. Raises: SinkError."""

    @abstractmethod
    def log(self, metrics: dict[str, Any], step_key: str, step: int, time_s: float) -> None:
        """One row: metrics by name, at `step` of the axis `step_key`, at Unix time `time_s`."""

    def state_dict(self) -> dict[str, Any]:
        """What a resumed run needs to go on in the same place."""
        return {}

    def close(self) -> None:
        """Write out everything that is held back."""
