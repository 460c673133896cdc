"""A world of processes joined by gloo that runs functions collectively; started once, shared by many tests.

    with World(2) as world:
        results = world.run(train_one_step, model_dir)      # train_one_step(model_dir) on both ranks

Functions must be importable (module level). A rank that raises fails the test with its own traceback.
"""

from __future__ import annotations

import contextlib
import datetime
import multiprocessing
import os
import tempfile
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any


def _worker(rank: int, size: int, store_path: str, backend: str, connection: Connection) -> None:
    os.environ["OMP_NUM_THREADS"] = "1"
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    store = dist.FileStore(store_path, size)
    dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=datetime.timedelta(seconds=60))
    while (job := connection.recv()) is not None:
        function, args, kwargs = job
        try:
            connection.send((True, function(*args, **kwargs)))
        except BaseException as error:
            error.__traceback__, text = None, traceback.format_exc()
            try:
                connection.send((False, (error, text)))
            except Exception:  # an exception that cannot be pickled
                connection.send((False, (RuntimeError(str(error)), text)))
    dist.destroy_process_group()


class World:
    """`size` ranks, of gloo or another torch.distributed backend. `run` returns what each rank returned, or raises what the first failing one raised."""

    def __init__(self, size: int, *, timeout_s: float = 120.0, backend: str = "gloo", may_fork: bool = False) -> None:
        """`may_fork`: whether ranks start processes of their own, as megatron-core does to write a checkpoint."""
        self.size, self.timeout_s, self.backend, self.may_fork = size, timeout_s, backend, may_fork
        self._connections: list[Connection] = []
        self._processes: list[Any] = []

    def _start(self) -> None:
        context = multiprocessing.get_context("spawn")
        self._folder = tempfile.TemporaryDirectory(prefix="gloo_world_")
        store = str(Path(self._folder.name) / "store")
        for rank in range(self.size):
            ours, theirs = context.Pipe()
            arguments = (rank, self.size, store, self.backend, theirs)
            process = context.Process(target=_worker, args=arguments, daemon=not self.may_fork)
            process.start()
            theirs.close()
            self._connections.append(ours)
            self._processes.append(process)

    def run(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> list[Any]:
        if not self._processes:
            self._start()
        for connection in self._connections:
            connection.send((function, args, kwargs))
        answers: dict[int, Any] = {}
        deadline = time.monotonic() + self.timeout_s
        while len(answers) < self.size and time.monotonic() < deadline:
            waiting = [c for rank, c in enumerate(self._connections) if rank not in answers]
            for connection in wait(waiting, timeout=max(0.0, deadline - time.monotonic())):
                rank = self._connections.index(connection)
                answers[rank] = self._receive(rank)
                if not answers[rank][0]:
                    # Its peers may be waiting for it in a collective.
                    deadline = min(deadline, time.monotonic() + 5.0)
        if len(answers) < self.size:
            self.close()  # the next run starts a new world
        for rank, (ok, value) in sorted(answers.items()):
            if not ok:
                error, text = value
                error.add_note(f"rank {rank}:\n{text}")
                raise error
        if len(answers) < self.size:
            raise TimeoutError(f"{function.__name__} did not finish within {self.timeout_s} s; done: {sorted(answers)}")
        return [answers[rank][1] for rank in range(self.size)]

    def _receive(self, rank: int) -> Any:
        try:
            return self._connections[rank].recv()
        except EOFError:
            code = self._processes[rank].exitcode
            return False, (RuntimeError(f"rank {rank} died with exit code {code}"), "")

    def close(self) -> None:
        for connection, process in zip(self._connections, self._processes, strict=True):
            with contextlib.suppress(OSError):
                connection.send(None)
            process.join(timeout=2)
            if process.is_alive():
                process.kill()
                process.join(timeout=5)
        if self._processes:
            self._folder.cleanup()
        self._connections, self._processes = [], []

    def __enter__(self) -> World:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()
