"""What a session server refuses, each with its HTTP status."""

from __future__ import annotations


class SessionError(Exception):
    """Answered as `{"error": {"message": text, "type": class, "code": status}}`, which OpenAI clients read. `retryable` False tells clients not to try the same again."""

    status = 400
    retryable = False


class RequestRefused(SessionError):
    """The request asks for what a session does not give."""

    status = 400


class WrongKey(SessionError):
    status = 401


class SessionNotFound(SessionError):
    status = 404


class HistoryConflict(SessionError):
    """Another generation was committed at this place while this one ran, or the place cannot be extended."""

    status = 409


class TruncatedGeneration(HistoryConflict):
    """The turn to be continued was cut off at its token limit: nobody knows what the model would have said."""


class TooLarge(SessionError):
    status = 413


class TooManySessions(SessionError):
    status = 429
    retryable = True


class BadEngineAnswer(SessionError):
    """The engine's answer breaks the token contract; nothing of it is kept."""

    status = 502


class EngineUnavailable(SessionError):
    status = 502


class Aborted(SessionError):
    """The batch was cut off: the engine stopped before the answer was complete."""

    status = 503
