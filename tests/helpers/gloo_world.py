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
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any


def _worker(rank: int, size: int, store_path: str, connection: Connection) -> None:
    os.environ["OMP_NUM_THREADS"] = "1"
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    store = dist.FileStore(store_path, size)
    dist.init_process_group(
        "gloo", store=store, rank=rank, world_size=size, timeout=datetime.timedelta(seconds=60)
    )
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
    """`size` ranks. `run` returns what each rank returned, or raises what the first failing one raised."""

    def __init__(self, size: int, *, timeout_s: float = 120.0) -> None:
        self.size, self.timeout_s = size, timeout_s
        context = multiprocessing.get_context("spawn")
        self._folder = tempfile.TemporaryDirectory(prefix="gloo_world_")
        store = str(Path(self._folder.name) / "store")
        self._connections, self._processes = [], []
        for rank in range(size):
            ours, theirs = context.Pipe()
            process = context.Process(target=_worker, args=(rank, size, store, theirs), daemon=True)
            process.start()
            theirs.close()
            self._connections.append(ours)
            self._processes.append(process)

    def run(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> list[Any]:
        for connection in self._connections:
            connection.send((function, args, kwargs))
        answers = []
        for rank, connection in enumerate(self._connections):
            if not connection.poll(self.timeout_s):
                self.close()
                raise TimeoutError(f"rank {rank} did not finish {function.__name__} within {self.timeout_s} s")
            answers.append(connection.recv())
        for rank, (ok, value) in enumerate(answers):
            if not ok:
                error, text = value
                error.add_note(f"rank {rank}:\n{text}")
                raise error
        return [value for _, value in answers]

    def close(self) -> None:
        for connection, process in zip(self._connections, self._processes, strict=True):
            with contextlib.suppress(OSError):
                connection.send(None)
            process.join(timeout=5)
            if process.is_alive():
                process.kill()
                process.join(timeout=5)
        self._folder.cleanup()

    def __enter__(self) -> World:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()
