"""How buckets reach the engines: the interface, and the choice by flag."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

from miles.utils.imports import load_function
from miles.weight_update.buckets import FlatBucket
from miles.weight_update.types import EngineEndpoint

_TRANSPORTS = {
    "broadcast": "miles.weight_update.transports.broadcast.BroadcastTransport",
    "ipc": "miles.weight_update.transports.ipc.IpcTransport",
}


class WeightTransport(ABC):
    """Moves buckets from one source rank to every engine. Synchronous: it runs inside a trainer rank's method.

    Order: connect, send for each bucket, finish; then again from connect. After an error: abandon, then connect.
    Every method returns or raises WeightTransferError within its deadline, naming the engine and the bucket.

    `touched`: indices of the engines that were asked to load anything since `connect`; their weights may be mixed.
    """

    touched: frozenset[int] = frozenset()

    def __init__(self, args: Any, source: int, num_sources: int) -> None:
        """`source` of `num_sources`: which of the trainer's sending ranks this is (one a pipeline stage)."""
        self.args, self.source, self.num_sources = args, source, num_sources

    @abstractmethod
    def connect(self, engines: Sequence[EngineEndpoint]) -> None:
        """Be ready to send to exactly these engines; cheap when they are those of the last time."""

    @abstractmethod
    def send(self, bucket: FlatBucket) -> None:
        """Begin to deliver a bucket; the bucket before it has been delivered when this returns."""

    @abstractmethod
    def finish(self) -> None:
        """Return when every engine has acknowledged every bucket."""

    @abstractmethod
    def abandon(self) -> None:
        """Drop what is in flight and every connection that a failure has left in doubt. Does not raise."""

    @abstractmethod
    def close(self) -> None:
        """Release everything. Does not raise."""


def load_transport(args: Any, source: int = 0, num_sources: int = 1) -> WeightTransport:
    """The transport that `--update-weight-transfer-mode` names, or one of the user's by import path."""
    mode = args.update_weight_transfer_mode
    if mode not in _TRANSPORTS and "." not in mode:
        raise ValueError(
            f"--update-weight-transfer-mode {mode} is not available; there is {', '.join(_TRANSPORTS)}, or an import path "
            "to a miles.weight_update.transports.base.WeightTransport"
        )
    transport = load_function(_TRANSPORTS.get(mode, mode))
    if not (isinstance(transport, type) and issubclass(transport, WeightTransport)):
        raise ValueError(f"--update-weight-transfer-mode {mode}: {transport!r} is not a subclass of WeightTransport")
    return transport(args, source, num_sources)
