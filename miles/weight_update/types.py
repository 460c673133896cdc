"""What a weight update is made of: endpoints, tensor records, buckets, the manifest that both sides must agree on."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # the driver and the coordinator use these types without needing torch
    import torch

    from miles.weight_update.served_digests import ServedDigests


@dataclass(frozen=True)
class EngineEndpoint:
    """Where one engine takes control calls. `incarnation` grows with every restart, so a stale handle is recognised."""

    index: int
    url: str
    admin_key: str
    world_size: int  # ranks that join a broadcast group (tensor parallel size)
    incarnation: int
    digests: str = "tensor"  # what its checksums digest: see `miles.backends.engine_api.capabilities`


@dataclass(frozen=True)
class TensorRecord:
    """What one tensor must be on the engine: shape, dtype (torch name without the prefix) and digest of its bytes."""

    dtype: str
    shape: tuple[int, ...]
    digest: str


Manifest = dict[str, TensorRecord]


@dataclass
class Bucket:
    """Serving-ready tensors under Hugging Face names that travel together."""

    index: int
    tensors: list[tuple[str, torch.Tensor]] = field(default_factory=list)

    @property
    def nbytes(self) -> int:
        return sum(t.numel() * t.element_size() for _, t in self.tensors)


@dataclass
class TransferReport:
    """What the trainer sent in one update: the manifest of every tensor, and where the time went (seconds)."""

    version: int
    manifest: Manifest
    buckets: int
    nbytes: int
    gather_s: float
    transfer_s: float
    served: ServedDigests | None = None  # what servers that join tensors must answer; None where none does
