"""What can go wrong between this framework and an engine, as types that callers act on."""

from __future__ import annotations


class EngineError(RuntimeError):
    """Base: a call to an engine did not succeed. The message names the url, the call and what happened."""


class EngineUnreachable(EngineError):
    """No connection, or it closed before an answer: the process is gone or restarting."""


class EngineTimeout(EngineError):
    """No answer within the deadline: the engine is hung, or the deadline is too short for the work."""


class EngineRejected(EngineError):
    """The engine refused the call (4xx, or `success: false`): the same call will be refused again."""

    def __init__(self, message: str, status: int) -> None:
        super().__init__(message)
        self.status = status

    def __reduce__(self) -> tuple:
        return type(self), (str(self), self.status)  # survives Ray's pickling


class EngineFailed(EngineError):
    """The engine failed to do the work (5xx, or an answer that is not what the call promises)."""

    def __init__(self, message: str, status: int) -> None:
        super().__init__(message)
        self.status = status

    def __reduce__(self) -> tuple:
        return type(self), (str(self), self.status)


class EngineStartError(EngineError):
    """An engine process did not become ready: it died, or its start deadline passed."""
