"""Broadcast: every engine rank receives every bucket from one sender, in one process group (gloo or NCCL)."""

from __future__ import annotations

import concurrent.futures
import contextlib
import itertools
import os
import socket
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

import torch
import torch.distributed as dist

from miles.backends.engine_api.client import EngineClient
from miles.utils.loop_thread import LoopThread
from miles.utils.process_group import join_group, leave_group
from miles.weight_update.buckets import FlatBucket
from miles.weight_update.errors import WeightTransferError
from miles.weight_update.transports.base import WeightTransport
from miles.weight_update.transports.deliveries import wait_all
from miles.weight_update.types import EngineEndpoint

Future = concurrent.futures.Future

_group_numbers = itertools.count()
_FAREWELL_TIMEOUT_S = 10.0


@dataclass
class _Delivery:
    """A bucket on its way: the engines' replies and the collective, which end together."""

    bucket: FlatBucket
    work: dict[str, Future]


class BroadcastTransport(WeightTransport):
    """One request to each engine with the bucket's names, dtypes and shapes, and at the same time one broadcast.

    The sender is rank 0, the engines' ranks follow in the order of their indices. Two buckets exist at a time: one on its
    way, one being gathered.
    """

    def __init__(self, args: Any, source: int, num_sources: int) -> None:
        super().__init__(args, source, num_sources)
        self.timeout_s: float = args.weight_update_timeout
        self.backend = "nccl" if args.train_device == "cuda" and not shares_gpus(args) else "gloo"
        self._device = torch.device("cuda", torch.cuda.current_device()) if self.backend == "nccl" else None
        self._loop = LoopThread("weight-broadcast")
        self._engines: tuple[EngineEndpoint, ...] = ()
        self._clients: dict[int, EngineClient] = {}
        self._group: dist.ProcessGroup | None = None
        self._group_name = ""
        self._delivery: _Delivery | None = None
        self._deadline = 0.0  # of the update in progress, monotonic

    # ---- the interface ---------------------------------------------------------------------------------------------

    def connect(self, engines: Sequence[EngineEndpoint]) -> None:
        self.touched = frozenset()
        self._deadline = time.monotonic() + self.timeout_s
        ordered = tuple(sorted(engines, key=lambda e: e.index))
        if self._group is not None and ordered == self._engines:
            return
        self._say_goodbye(staying={(e.url, e.incarnation) for e in ordered})
        self._engines = ordered
        self._clients = {e.index: EngineClient(e.url, admin_key=e.admin_key, retries=0) for e in ordered}
        self._group_name = f"miles-weights-{socket.gethostname()}-{os.getpid()}-{self.source}-{next(_group_numbers)}"
        self._group = self._join()

    def send(self, bucket: FlatBucket) -> None:
        self._settle()
        self.touched = frozenset(self._clients)
        replies = {
            f"engine {index}": self._loop.submit(
                client.update_weights_from_distributed(
                    bucket.names, bucket.dtypes, bucket.shapes, self._group_name, timeout_s=self._left()
                )
            )
            for index, client in self._clients.items()
        }
        data = bucket.data  # now: the updater may move the bucket to the host while this is on its way
        broadcast = in_thread(lambda: self._broadcast(data), "weight-broadcast-collective")
        self._delivery = _Delivery(bucket, replies | {"broadcast": broadcast})

    def finish(self) -> None:
        self._settle()

    def abandon(self) -> None:
        if self._delivery is not None:
            for future in self._delivery.work.values():
                future.cancel()
            self._delivery = None
        self._leave(abort=True)
        self._close_clients()
        self._engines = ()

    def close(self) -> None:
        self.abandon()
        self._loop.close()

    # ---- joining and leaving ---------------------------------------------------------------------------------------

    def _join(self) -> dist.ProcessGroup:
        address = address_towards(self._engines)
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        listener = socket.create_server((address, 0), family=family, backlog=2048)
        port = listener.getsockname()[1]
        world = 1 + sum(e.world_size for e in self._engines)
        work: dict[str, Future] = {}
        offset = 1
        for engine in self._engines:
            joining = self._clients[engine.index].init_weights_update_group(
                address, port, offset, world, self._group_name, self.backend, timeout_s=self.timeout_s
            )
            work[f"engine {engine.index}"] = self._loop.submit(joining)
            offset += engine.world_size
        work["trainer"] = in_thread(
            lambda: join_group(
                address, port, 0, world, self._group_name, self.backend, self.timeout_s, self._device, listener
            ),
            "weight-group-join",
        )
        problem = wait_all(work, self._deadline)
        if problem is None:
            return work["trainer"].result()
        work["trainer"].add_done_callback(_leave_late)
        for future in work.values():
            future.cancel()
        self._close_clients()
        self._engines = ()
        raise WeightTransferError(
            f"the trainer and {world - 1} engine ranks did not form a group within {self.timeout_s:g} s: {problem}",
            frozenset(),
        )

    def _say_goodbye(self, staying: set[tuple[str, int]]) -> None:
        """Leave the group; engines that live on are told to leave it too, since they would keep its buffers."""
        if self._group is None:
            return
        work = {
            f"engine {e.index}": self._loop.submit(
                self._clients[e.index].destroy_weights_update_group(self._group_name, timeout_s=_FAREWELL_TIMEOUT_S)
            )
            for e in self._engines
            if (e.url, e.incarnation) in staying
        }
        self._leave(abort=False)
        # An engine that cannot leave is about to show why: it has to join the next group.
        concurrent.futures.wait(work.values(), timeout=_FAREWELL_TIMEOUT_S)
        self._close_clients()

    def _leave(self, *, abort: bool) -> None:
        group, self._group = self._group, None
        if group is None:
            return
        leaving = in_thread(lambda: leave_group(group, abort=abort), "weight-group-leave")
        concurrent.futures.wait([leaving], timeout=_FAREWELL_TIMEOUT_S)

    def _left(self) -> float:
        """Seconds that the update in progress still has."""
        return max(self._deadline - time.monotonic(), 0.1)

    def _close_clients(self) -> None:
        clients, self._clients = self._clients, {}
        for client in clients.values():
            with contextlib.suppress(Exception):
                self._loop.run(client.close(), _FAREWELL_TIMEOUT_S)

    # ---- one bucket ------------------------------------------------------------------------------------------------

    def _broadcast(self, data: torch.Tensor) -> None:
        if self.backend == "gloo":
            dist.broadcast(data.cpu(), src=0, group=self._group)
            return
        with torch.cuda.device(self._device):
            dist.broadcast(data.to(self._device), src=0, group=self._group)  # a kept bucket is on the host
            torch.cuda.current_stream().synchronize()

    def _settle(self) -> None:
        """Wait until the bucket on its way has arrived everywhere."""
        delivery, self._delivery = self._delivery, None
        if delivery is None:
            return
        problem = wait_all(delivery.work, self._deadline)
        if problem is not None:
            self._delivery = delivery  # for abandon
            raise WeightTransferError(
                f"{delivery.bucket} did not reach every engine within the {self.timeout_s:g} s of an update: {problem}",
                self.touched,
            )


def shares_gpus(args: Any) -> bool:
    """Whether trainer and engines may be on one GPU, where NCCL refuses to have two ranks."""
    return bool(args.colocate) or getattr(args, "gpus_per_rank", 1.0) < 1


def in_thread(function: Callable[[], Any], name: str) -> Future:
    """Run `function` in a thread that does not keep the process alive, however long it hangs."""
    future: Future = Future()

    def run() -> None:
        try:
            result = function()
        except BaseException as error:
            _resolve(future, error=error)
        else:
            _resolve(future, result=result)

    threading.Thread(target=run, name=name, daemon=True).start()
    return future


def _resolve(future: Future, *, result: Any = None, error: BaseException | None = None) -> None:
    with contextlib.suppress(concurrent.futures.InvalidStateError):  # it was given up and cancelled
        if error is not None:
            future.set_exception(error)
        else:
            future.set_result(result)


def _leave_late(joining: Future) -> None:
    if not joining.cancelled() and joining.exception() is None:
        leave_group(joining.result(), abort=True)


def address_towards(engines: Sequence[EngineEndpoint]) -> str:
    """This host's address as the engines reach it: that of the interface from which theirs are reached.

    If any engine is on another host, loopback addresses are of no use to it, so its route decides.
    """
    found = "127.0.0.1"
    for engine in engines:
        parts = urlsplit(engine.url)
        family, _, _, _, target = socket.getaddrinfo(parts.hostname, parts.port, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(target)  # sends nothing: the kernel only picks the route
            address = probe.getsockname()[0]
        if not address.startswith("127.") and address != "::1":
            return address
    return found
