"""From a stream of tensors to size-bounded buckets, and from a bucket to the one byte tensor that travels."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch

from miles.utils.digest import dtype_name, tensor_digest
from miles.weight_update.types import Bucket, TensorRecord

Unit = list[tuple[str, torch.Tensor]]

# A quantization scale is meaningless without its weight: it joins the unit of the tensor before it.
_SCALE_SUFFIXES = (".weight_scale_inv", ".weight_scale", ".weight_scale_2", ".input_scale")


def units(items: Iterable[Any]) -> Iterator[Unit]:
    """Groups that must arrive together. An item is a (name, tensor), or a list of them that the backend declares atomic."""
    pending: Unit = []
    for item in items:
        unit = [item] if isinstance(item, tuple) else list(item)
        belongs = bool(pending) and len(unit) == 1 and _is_scale_of(unit[0][0], pending[0][0])
        if pending and not belongs:
            yield pending
            pending = []
        pending = pending + unit
    if pending:
        yield pending


def _is_scale_of(name: str, weight_name: str) -> bool:
    return any(
        name.endswith(s) and name.removesuffix(s) == weight_name.removesuffix(".weight") for s in _SCALE_SUFFIXES
    )


def pack_buckets(items: Iterable[Any], limit_bytes: int) -> Iterator[Bucket]:
    """Fill buckets in order up to `limit_bytes`; a unit larger than that travels alone, and none is ever split."""
    bucket = Bucket(0)
    for unit in units(items):
        size = sum(t.numel() * t.element_size() for _, t in unit)
        if bucket.tensors and bucket.nbytes + size > limit_bytes:
            yield bucket
            bucket = Bucket(bucket.index + 1)
        bucket.tensors.extend(unit)
    if bucket.tensors:
        yield bucket


class FlatBucket:
    """A bucket as one uint8 tensor `[nbytes]`: the bytes of all its tensors, in the order of `names`.

    The receiver views each part under its dtype, so wide dtypes come first: every offset is then a multiple of the
    element size. It owns its bytes: the model may change while the bucket is on its way, or kept.
    """

    def __init__(self, bucket: Bucket) -> None:
        ordered = sorted(bucket.tensors, key=lambda item: -item[1].element_size())
        self.index = bucket.index
        self.names = [name for name, _ in ordered]
        self.dtypes = [dtype_name(t.dtype) for _, t in ordered]
        self.shapes = [tuple(t.shape) for _, t in ordered]
        self.data = torch.cat([t.detach().contiguous().reshape(-1).view(torch.uint8) for _, t in ordered])
        self._torch_dtypes = [t.dtype for _, t in ordered]

    @property
    def nbytes(self) -> int:
        return self.data.numel()

    def __str__(self) -> str:
        more = f" and {len(self.names) - 1} more" if len(self.names) > 1 else ""
        return f"bucket {self.index} ({self.names[0]}{more}, {self.nbytes} bytes)"

    def tensors(self, data: torch.Tensor | None = None) -> Iterator[tuple[str, torch.Tensor]]:
        """Typed views into the bytes."""
        data, start = self.data if data is None else data, 0
        for name, dtype, shape in zip(self.names, self._torch_dtypes, self.shapes, strict=True):
            end = start + torch.Size(shape).numel() * dtype.itemsize
            yield name, data[start:end].view(dtype).reshape(shape)
            start = end

    def records(self, host: torch.Tensor | None) -> dict[str, TensorRecord]:
        """What each tensor must be on the engine. `host`: the bytes in host memory; None leaves the digests empty."""
        if host is None:
            described = zip(self.names, self.dtypes, self.shapes, strict=True)
            return {name: TensorRecord(dtype, shape, "") for name, dtype, shape in described}
        return {
            name: TensorRecord(dtype_name(tensor.dtype), tuple(tensor.shape), tensor_digest(tensor))
            for name, tensor in self.tensors(host)
        }

    def to_host(self) -> FlatBucket:
        """Move the bytes to host memory (to keep them without device memory)."""
        self.data = self.data.cpu()
        return self
