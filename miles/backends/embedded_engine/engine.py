"""The thread that owns model, cache and requests, and the few ways to reach it from outside."""

from __future__ import annotations

import concurrent.futures
import logging
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable
from typing import Any, TypeVar

import torch

from miles.backends.embedded_engine.faults import Faults
from miles.backends.embedded_engine.request import Request, finish_abort
from miles.backends.embedded_engine.scheduler import Scheduler

logger = logging.getLogger(__name__)
T = TypeVar("T")
PAUSE_MODES = ("abort", "retract", "in_place")


class Engine:
    """Runs the scheduler in one thread.

    Everything that touches the scheduler runs there: `submit` hands requests over, `call` runs a function between two
    steps, `exclusive` runs one when no request is in flight (or the engine is paused). While paused, while a weight update
    session is open and while exclusive work waits, new requests are held back.
    """

    def __init__(self, scheduler: Scheduler, faults: Faults, on_death: Callable[[str], None] | None = None):
        self.scheduler, self.faults, self._on_death = scheduler, faults, on_death
        self.paused: str | None = None
        self.update_session: str | None = None
        self.released: set[str] = set()
        self.death: str | None = None  # traceback of the thread's end
        self._wake = threading.Condition()
        self._inbox: deque[Request] = deque()
        self._calls: deque[tuple[Callable[[], Any], concurrent.futures.Future]] = deque()
        self._exclusive: deque[tuple[Callable[[], Any], concurrent.futures.Future]] = deque()
        self.held: deque[Request] = deque()
        self._stopping = False
        self._busy_since: float | None = None
        self._busy_with = ""
        self.thread = threading.Thread(target=self._run, name="engine", daemon=True)

    # ---- from other threads --------------------------------------------------------------------------------------

    def start(self) -> None:
        self.thread.start()

    def stop(self) -> None:
        with self._wake:
            self._stopping = True
            self._wake.notify()

    def submit(self, requests: list[Request]) -> None:
        with self._wake:
            self._inbox.extend(requests)
            self._wake.notify()

    def call(self, function: Callable[[], T]) -> concurrent.futures.Future[T]:
        """Run `function` in the engine thread, after the step in progress."""
        return self._enqueue(self._calls, function)

    def exclusive(self, function: Callable[[], T]) -> concurrent.futures.Future[T]:
        """Run `function` in the engine thread when paused, or else as soon as every request in flight has finished."""
        return self._enqueue(self._exclusive, function)

    def _enqueue(self, queue: deque, function: Callable[[], T]) -> concurrent.futures.Future[T]:
        future: concurrent.futures.Future[T] = concurrent.futures.Future()
        with self._wake:
            if self.death is not None:
                future.set_exception(RuntimeError(f"the engine thread has died: {self.death.strip().splitlines()[-1]}"))
            else:
                queue.append((function, future))
            self._wake.notify()
        return future

    def stuck_for(self) -> tuple[float, str]:
        """Seconds that the current step or call has taken, and what it is; (0, "") when idle."""
        since = self._busy_since
        return (0.0, "") if since is None else (time.monotonic() - since, self._busy_with)

    # ---- the thread ----------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            with torch.inference_mode():
                while not self._stopping:
                    self._turn()
        except BaseException:
            self._die(traceback.format_exc())

    def _turn(self) -> None:
        with self._wake:
            while not self._has_work():
                self._wake.wait()
            calls, self._calls = self._calls, deque()
            arrived, self._inbox = self._inbox, deque()
        for function, future in calls:
            self._execute(function, future)
        self.held.extend(arrived)
        if self._exclusive and (self.paused or self.scheduler.num_requests == 0):
            self._execute(*self._exclusive.popleft())
        if not self._holding and self.held:
            self._release_held()
        if self.paused is None and self.scheduler.num_requests:
            self._busy("a step")
            self.scheduler.step()
            self.faults.after_step(self.scheduler.generated_tokens)
            self._busy_since = None

    @property
    def _holding(self) -> bool:
        return self.paused is not None or self.update_session is not None or bool(self._exclusive)

    def _has_work(self) -> bool:
        if self._calls or self._inbox or self._stopping:
            return True
        if self._exclusive and (self.paused or self.scheduler.num_requests == 0):
            return True
        return self.paused is None and (self.scheduler.num_requests > 0 or (bool(self.held) and not self._holding))

    def _busy(self, what: str) -> None:
        self._busy_with, self._busy_since = what, time.monotonic()

    def _execute(self, function: Callable[[], Any], future: concurrent.futures.Future) -> None:
        if not future.set_running_or_notify_cancel():
            return
        self._busy(getattr(function, "__name__", "a call"))
        try:
            future.set_result(function())
        except Exception as error:
            future.set_exception(error)
        finally:
            self._busy_since = None

    def _release_held(self) -> None:
        refusal = self.cannot_generate()
        while self.held:
            request = self.held.popleft()
            if refusal:
                request.finish_reason = finish_abort(refusal, 503)
                request.emit(request)
            else:
                self.scheduler.add(request)

    def cannot_generate(self) -> str | None:
        """Why no token can be sampled now, whatever the request."""
        gone = self.released & {"weights", "kv_cache"}
        if gone:
            return f"memory is released ({', '.join(sorted(gone))}): call /resume_memory_occupation first"
        missing = list(self.scheduler.model.weights.missing)  # at once: the engine thread may be changing it
        if missing:
            return f"{len(missing)} weights have no content since they were released (first: {min(missing)}): update them first"
        return None

    def _die(self, trace: str) -> None:
        """Fail everything that waits: nobody may hang on a dead thread."""
        logger.error("the engine thread died:\n%s", trace)
        with self._wake:
            self.death = trace
            waiting = [*self._calls, *self._exclusive]
            requests = [*self.scheduler.all_requests(), *self.held, *self._inbox]
        last = trace.strip().splitlines()[-1]
        for _, future in waiting:
            if future.set_running_or_notify_cancel():
                future.set_exception(RuntimeError(f"the engine thread has died: {last}"))
        for request in requests:
            if not request.finished:
                request.finish_reason = finish_abort(f"the engine thread has died: {last}", 500)
                request.emit(request)
        if self._on_death is not None:
            self._on_death(trace)

    # ---- to be run with `call` or `exclusive` --------------------------------------------------------------------

    def abort(self, rid: str = "", abort_all: bool = False) -> int:
        """Abort requests by id or all of them; each answers with the tokens it has. Returns how many.

        The id of a batch, or of one prompt sampled n times, means all of its `{rid}_{i}`.
        """
        everyone = [*self.scheduler.all_requests(), *self.held]
        matching = [r for r in everyone if abort_all or (rid and _is_part_of(r.rid, rid))]
        for request in matching:
            self._abort_one(request)
        return len(matching)

    def abort_exactly(self, rids: list[str]) -> None:
        """Abort requests whose client has gone."""
        for request in [*self.scheduler.all_requests(), *self.held]:
            if request.rid in rids:
                self._abort_one(request)

    def _abort_one(self, request: Request) -> None:
        if request in self.held:
            self.held.remove(request)
            request.finish_reason = finish_abort("Aborted")
            request.emit(request)
        else:
            self.scheduler.abort(request)

    def pause(self, mode: str) -> None:
        """`abort`: end what is in flight. `retract`: requeue it without its cache. `in_place`: freeze it."""
        if mode == "abort":
            self.abort(abort_all=True)
        elif mode == "retract":
            self.scheduler.retract_all()
        self.paused = mode

    def resume(self) -> None:
        self.paused = None

    def flush(self) -> str | None:
        """Drop all cached prefixes. Returns why that is refused, or None.

        While paused, queued requests do not matter (they hold no cache); frozen ones do.
        """
        pending = self.scheduler.num_active if self.paused else self.scheduler.num_requests
        if pending:
            frozen = " that are frozen with their cache (pause mode in_place)" if self.paused else ""
            return f"the cache is in use by {pending} requests{frozen}"
        self.scheduler.drop_cache()
        return None


def _is_part_of(rid: str, of: str) -> bool:
    return rid == of or (rid.startswith(of + "_") and rid[len(of) + 1 :].isdigit())
