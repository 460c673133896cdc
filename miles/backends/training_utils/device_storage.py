"""Device memory given back while the tensors in it stay where they are: contents wait on the host."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch.distributed.tensor import DTensor


class DeviceStorage:
    """Releases the storages of tensors and restores them, contents and all views included.

    A storage of zero bytes keeps every tensor object, and what else refers to it, valid: nothing has to be rebuilt after
    `restore`. Host copies are pinned, and kept, so that every release but the first runs at the speed of the bus.
    """

    def __init__(self, device: torch.device) -> None:
        """Of tensors on `device`'s kind of device."""
        self._kind = device.type
        self._host: dict[int, torch.Tensor] = {}  # by place in the order of release
        self._released: list[tuple[torch.UntypedStorage, int]] = []

    @property
    def nbytes(self) -> int:
        """Bytes that are released now."""
        return sum(size for _, size in self._released)

    def release(self, tensors: Iterable[torch.Tensor]) -> None:
        """Copy to the host, and free. Tensors on the host, and storages that are free already, are left alone."""
        for storage in self._storages(tensors):
            size, place = storage.nbytes(), len(self._released)
            host = self._host.get(place)
            if host is None or host.numel() < size:
                host = self._host[place] = torch.empty(size, dtype=torch.uint8, pin_memory=self._kind == "cuda")
            host[:size].copy_(_bytes_of(storage), non_blocking=True)
            self._released.append((storage, size))
        self._synchronize()
        for storage, _ in self._released:
            storage.resize_(0)

    def restore(self) -> None:
        """Allocate again and copy back. Nothing happens where nothing is released."""
        for place, (storage, size) in enumerate(self._released):
            storage.resize_(size)
            _bytes_of(storage).copy_(self._host[place][:size], non_blocking=True)
        self._synchronize()
        self._released = []

    def _storages(self, tensors: Iterable[torch.Tensor]) -> list[torch.UntypedStorage]:
        found: dict[int, torch.UntypedStorage] = {}
        for tensor in tensors:
            local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
            if local.device.type == self._kind and local.untyped_storage().nbytes():
                found[local.untyped_storage()._cdata] = local.untyped_storage()
        return list(found.values())

    def _synchronize(self) -> None:
        if self._kind == "cuda":
            torch.cuda.synchronize()


def _bytes_of(storage: torch.UntypedStorage) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
