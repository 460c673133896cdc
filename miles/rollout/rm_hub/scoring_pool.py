"""A pool of processes for CPU-bound rewards, whose hung workers are killed and replaced."""

from __future__ import annotations

import asyncio
import contextlib
import os
import queue
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import Future
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Any

_START_TIMEOUT_S = 120.0  # for a worker to start and import the scorer; no reward's fault, so not on its clock
_CLOSE_TIMEOUT_S = 5.0


class ScoringTimeout(Exception):
    """A scoring that ran past its deadline; its worker was killed."""


class ScoringCrash(Exception):
    """A worker that died while scoring: out of memory, a crash in a C extension, killed from outside."""


class PoolClosed(RuntimeError):
    """The pool was closed while the scoring waited or ran."""


@dataclass
class _Task:
    path: str
    arguments: tuple[Any, ...]
    timeout_s: float
    future: Future = field(default_factory=Future)


class ScoringPool:
    """Runs functions, named by import path, in worker processes; usable from any thread and any event loop.

    The deadline of a scoring counts from the moment its worker starts it, so waiting in line or for imports never times
    a scoring out. Each worker belongs to one thread here, which starts, feeds, kills and replaces it; no signals or
    alarms are used. Workers die with this process, however it dies.
    """

    def __init__(self, num_workers: int) -> None:
        if num_workers < 1:
            raise ValueError(f"a scoring pool needs at least 1 worker, not {num_workers}")
        self._tasks: queue.SimpleQueue[_Task | None] = queue.SimpleQueue()
        self._closing = threading.Event()
        self._lock = threading.Lock()
        self.workers_replaced = 0
        self._keepers = [
            threading.Thread(target=self._keep_worker, name=f"scoring-{i}", daemon=True) for i in range(num_workers)
        ]
        for keeper in self._keepers:
            keeper.start()

    def submit(self, path: str, *arguments: Any, timeout_s: float) -> Future:
        """Score `path(*arguments)`. The future raises what the function raised, ScoringTimeout, ScoringCrash or PoolClosed."""
        task = _Task(path, arguments, timeout_s)
        if self._closing.is_set():
            task.future.set_exception(PoolClosed("the scoring pool is closed"))
        else:
            self._tasks.put(task)
        return task.future

    async def score(self, path: str, *arguments: Any, timeout_s: float) -> Any:
        """`submit`, awaited."""
        return await asyncio.wrap_future(self.submit(path, *arguments, timeout_s=timeout_s))

    def close(self) -> None:
        """End the workers; what still waits or runs gets PoolClosed."""
        self._closing.set()
        for _ in self._keepers:
            self._tasks.put(None)
        for keeper in self._keepers:
            keeper.join(_CLOSE_TIMEOUT_S)
        with contextlib.suppress(queue.Empty):
            while True:
                task = self._tasks.get_nowait()
                if task is not None:
                    _fail(task, PoolClosed("the scoring pool was closed"))

    # ---- one thread a worker -------------------------------------------------------------------------------------

    def _keep_worker(self) -> None:
        worker: _Worker | None = None
        while not self._closing.is_set():
            task = self._tasks.get()
            if task is None:
                break
            if not task.future.set_running_or_notify_cancel():
                continue
            try:
                if worker is None or not worker.alive:
                    worker = _Worker()
                value = worker.run(task, self._closing)
            except Exception as error:
                _fail(task, error)
            else:
                task.future.set_result(value)
            if worker is not None and not worker.usable:
                worker.kill()
                worker = None
                with self._lock:
                    self.workers_replaced += 1
        if worker is not None:
            worker.kill()


def _fail(task: _Task, error: Exception) -> None:
    if not task.future.done():
        task.future.set_exception(error)


class _Worker:
    """A worker process and the socket to it. Its starting thread must outlive it: the kernel ties the two."""

    def __init__(self) -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            command = [
                sys.executable,
                "-m",
                "miles.rollout.rm_hub.scoring_worker",
                str(theirs.fileno()),
                str(os.getpid()),
            ]
            env = dict(os.environ, OMP_NUM_THREADS="1", PYTHONPATH=os.pathsep.join(filter(None, sys.path)))
            self.process = subprocess.Popen(
                command, pass_fds=[theirs.fileno()], env=env, stdin=subprocess.DEVNULL, start_new_session=True
            )
        self.connection = Connection(ours.detach())
        self.usable = True

    @property
    def alive(self) -> bool:
        return self.process.poll() is None

    def run(self, task: _Task, closing: threading.Event) -> Any:
        """Value of the task. After ScoringTimeout, ScoringCrash or PoolClosed the worker is not usable any more."""
        try:
            self.connection.send((task.path, task.arguments))
            kind, *content = self._receive(_START_TIMEOUT_S, closing, "starting")
            if kind == "started":
                kind, *content = self._receive(task.timeout_s, closing, "scoring")
        except (ScoringTimeout, PoolClosed):
            self.usable = False
            raise
        except (EOFError, OSError) as error:
            self.usable = False
            raise ScoringCrash(f"the worker died while scoring (exit code {self._exit_code()})") from error
        if kind == "failed":
            raise content[0]
        return content[0]

    def _receive(self, timeout_s: float, closing: threading.Event, doing: str) -> tuple[Any, ...]:
        deadline = time.monotonic() + timeout_s
        while not self.connection.poll(max(0.0, min(0.2, deadline - time.monotonic()))):
            if closing.is_set():
                raise PoolClosed("the scoring pool was closed")
            # Looked at once more before giving up: this thread may have been the one that was late.
            if time.monotonic() >= deadline and not self.connection.poll(0):
                raise ScoringTimeout(f"no result after {timeout_s:g} s of {doing}; the worker was killed")
        return self.connection.recv()

    def _exit_code(self) -> int | None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(1.0)
        return self.process.poll()

    def kill(self) -> None:
        self.connection.close()
        self.process.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(_CLOSE_TIMEOUT_S)
