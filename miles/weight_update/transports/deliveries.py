"""One call to each of several engines at a time, with one deadline for all of an update's calls."""

from __future__ import annotations

import concurrent.futures
import contextlib
import time
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

from miles.backends.engine_api.client import EngineClient
from miles.utils.loop_thread import LoopThread
from miles.weight_update.errors import WeightTransferError
from miles.weight_update.types import EngineEndpoint

Future = concurrent.futures.Future
# After the first failure, how long to wait for the others: a dead engine breaks its peers too, and its own is the story.
_GRACE_S = 1.0
_CLOSE_TIMEOUT_S = 10.0


class Deliveries:
    """The clients of an update's engines, and the bucket that is on its way to them."""

    def __init__(self, loop: LoopThread, timeout_s: float) -> None:
        self._loop, self._timeout_s = loop, timeout_s
        self._engines: tuple[EngineEndpoint, ...] = ()
        self._clients: dict[int, EngineClient] = {}
        self._deadline = 0.0
        self._what, self._work, self._kept = "", dict[str, Future](), None

    @property
    def indices(self) -> frozenset[int]:
        return frozenset(self._clients)

    def begin(self, engines: Sequence[EngineEndpoint], deadline: float) -> None:
        """Be ready for exactly these engines. `deadline`: of everything until the next `begin`, in monotonic seconds."""
        self._deadline = deadline
        ordered = tuple(sorted(engines, key=lambda e: e.index))
        if ordered != self._engines:
            self._close_clients()
            self._engines = ordered
            self._clients = {e.index: EngineClient(e.url, admin_key=e.admin_key, retries=0) for e in ordered}

    def deliver(
        self, what: str, call: Callable[[EngineClient, float], Coroutine[Any, Any, Any]], *, keep: Any = None
    ) -> None:
        """Begin `call(client, seconds_left)` on every engine. `keep` is held until `settle`."""
        left = max(self._deadline - time.monotonic(), 0.1)
        self._what, self._kept = what, keep
        self._work = {f"engine {i}": self._loop.submit(call(client, left)) for i, client in self._clients.items()}

    def settle(self) -> None:
        """Wait until the last delivery has arrived everywhere. Raises: WeightTransferError that names it and the engine."""
        if not self._work:
            return
        problem = wait_all(self._work, self._deadline)
        if problem is not None:
            raise WeightTransferError(
                f"{self._what} did not reach every engine within the {self._timeout_s:g} s of an update: {problem}",
                self.indices,
            )
        self._work, self._kept = {}, None

    def abandon(self) -> None:
        """Drop what is on its way, and the clients. Does not raise."""
        for future in self._work.values():
            future.cancel()
        self._work, self._kept = {}, None
        self._close_clients()
        self._engines = ()

    def _close_clients(self) -> None:
        clients, self._clients = self._clients, {}
        for client in clients.values():
            with contextlib.suppress(Exception):
                self._loop.run(client.close(), _CLOSE_TIMEOUT_S)


def wait_all(work: dict[str, Future], deadline: float) -> str | None:
    """Wait for all of `work`; None when it succeeded, else who failed with what, and who did not finish.

    Returns soon after the first failure, and at `deadline` (monotonic seconds).
    """
    everything = list(work.values())
    concurrent.futures.wait(
        everything, timeout=max(deadline - time.monotonic(), 0), return_when=concurrent.futures.FIRST_EXCEPTION
    )
    failed = [f for f in everything if f.done() and f.exception() is not None]
    if failed:
        concurrent.futures.wait(everything, timeout=_GRACE_S)
    problems = []
    for name, future in work.items():
        if not future.done():
            problems.append(f"{name} has not finished")
        elif (error := future.exception()) is not None:
            problems.append(f"{name}: {error}")
    return "; ".join(problems) or None
