"""Device handles: engines on the trainer's own device read a bucket where it lies, and nothing but a handle travels.

On a GPU that is CUDA IPC, which SGLang and the embedded engine open on the same card; on a CPU it is shared memory.
"""

from __future__ import annotations

import base64
import io
import time
from collections.abc import Sequence
from multiprocessing.reduction import ForkingPickler
from types import SimpleNamespace
from typing import Any

import torch
import torch.multiprocessing
from torch.multiprocessing import reductions

from miles.utils.loop_thread import LoopThread
from miles.weight_update.buckets import FlatBucket
from miles.weight_update.errors import WeightTransferError
from miles.weight_update.transports.base import WeightTransport
from miles.weight_update.transports.deliveries import Deliveries
from miles.weight_update.types import EngineEndpoint

_DEVICE = 6  # the place of the device's index among the arguments of torch's `rebuild_cuda_tensor`


class IpcTransport(WeightTransport):
    """One `/update_weights_from_tensor` to each engine for each bucket, with `load_format` "flattened_bucket".

    Engines copy the bucket into their weights before they answer. Two buckets exist at a time: one being copied, one being
    gathered. Where several ranks of the trainer send, each holds the whole model, and sends it to the engine on its device:
    engine i shares the device of rank i.
    """

    def __init__(self, args: Any, source: int, num_sources: int) -> None:
        super().__init__(args, source, num_sources)
        self.timeout_s: float = args.weight_update_timeout
        self._loop = LoopThread("weight-ipc")
        self._engines = Deliveries(self._loop, self.timeout_s)

    def connect(self, engines: Sequence[EngineEndpoint]) -> None:
        self.touched = frozenset()
        if self.num_sources > 1:
            engines = [engine for engine in engines if engine.index % self.num_sources == self.source]
        if wide := [e for e in engines if e.world_size > 1]:
            raise WeightTransferError(
                f"engine {wide[0].index} has {wide[0].world_size} ranks, and device handles reach the trainer's own device "
                "alone: set --rollout-num-gpus-per-engine 1",
                frozenset(),
            )
        self._engines.begin(engines, time.monotonic() + self.timeout_s)

    def send(self, bucket: FlatBucket) -> None:
        self._engines.settle()
        self.touched = self._engines.indices
        # The handle is good for as long as the tensor: the delivery keeps the data, whatever becomes of the bucket.
        payload, data = serialized(bucket), bucket.data
        self._engines.deliver(
            str(bucket),
            lambda client, left: client.update_weights_from_tensor(
                [payload], load_format="flattened_bucket", timeout_s=left
            ),
            keep=data,
        )

    def finish(self) -> None:
        self._engines.settle()
        if torch.cuda.is_available():
            torch.cuda.ipc_collect()  # what engines have let go of is this process's again

    def abandon(self) -> None:
        self._engines.abandon()

    def close(self) -> None:
        self.abandon()
        self._loop.close()


def serialized(bucket: FlatBucket) -> str:
    """Base64 of the pickle that `/update_weights_from_tensor` takes, with a handle in the place of the bytes."""
    metadata, start = [], 0
    for name, tensor in bucket.tensors():
        end = start + tensor.numel() * tensor.element_size()
        # SGLang reads these fields and asks for no class; its allow-list of classes has this one.
        entry = SimpleNamespace(name=name, shape=tensor.shape, dtype=tensor.dtype, start_idx=start, end_idx=end)
        entry.numel = end - start
        metadata.append(entry)
        start = end
    stream = io.BytesIO()
    strategy = torch.multiprocessing.get_sharing_strategy()
    torch.multiprocessing.set_sharing_strategy("file_system")  # an engine cannot reach this process's descriptors
    try:
        _HandlePickler(stream).dump({"flattened_tensor": bucket.data, "metadata": metadata})
    finally:
        torch.multiprocessing.set_sharing_strategy(strategy)
    return base64.b64encode(stream.getvalue()).decode()


class _HandlePickler(ForkingPickler):
    """Names a GPU by its UUID, as SGLang does: processes number the GPUs that they see each for itself."""

    def reducer_override(self, value: Any) -> Any:
        if not (isinstance(value, torch.Tensor) and value.is_cuda):
            return NotImplemented
        rebuild, arguments = reductions.reduce_tensor(value)
        uuid = str(torch.cuda.get_device_properties(arguments[_DEVICE]).uuid)
        return rebuild, (*arguments[:_DEVICE], uuid, *arguments[_DEVICE + 1 :])
