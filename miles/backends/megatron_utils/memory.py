"""Device memory given to the engines of a colocated run between training steps, and taken back.

Weights, gradient buffers and optimizer state are views into a few storages. A storage keeps its identity while its bytes are
away: every view, and every reference that megatron-core or torch holds, is right again when they come back.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from megatron.core.utils import unwrap_model

from miles.backends.megatron_utils import optimizer as optimizers


class DeviceMemory:
    """The storages of a trainer rank on its device."""

    def __init__(self, chunks: Sequence[Any], optimizer: Any) -> None:
        """`chunks`: wrapped in DDP."""
        self.chunks, self.optimizer = list(chunks), optimizer
        self._away: list[tuple[torch.UntypedStorage, torch.Tensor | None, int]] = []

    def release(self) -> int:
        """Copy what is worth keeping to the host and free the rest; returns the bytes freed. Does nothing while away."""
        if self._away:
            return 0
        gradients = {t.untyped_storage().data_ptr() for t in self._gradients()}
        seen: set[int] = set()
        for tensor in self._tensors():
            storage = tensor.untyped_storage()
            if storage.nbytes() == 0 or storage.data_ptr() in seen:
                continue
            seen.add(storage.data_ptr())
            # Gradients are set to zero before each step.
            kept = None if storage.data_ptr() in gradients else _bytes_of(storage).to("cpu", copy=True)
            self._away.append((storage, kept, storage.nbytes()))
        for storage, _, _ in self._away:
            storage.resize_(0)
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        return sum(size for _, _, size in self._away)

    def restore(self) -> None:
        """Undo `release`."""
        for storage, kept, size in self._away:
            storage.resize_(size)
            if kept is None:
                _bytes_of(storage).zero_()
            else:
                _bytes_of(storage).copy_(kept)
        self._away = []

    def _tensors(self) -> Iterator[torch.Tensor]:
        for chunk in self.chunks:
            model = unwrap_model(chunk)
            yield from (p.data for p in model.parameters())
            yield from model.buffers()
            for buffer in _buffers(chunk):
                if buffer.param_data is not None:
                    yield buffer.param_data
        yield from self._gradients()
        for part in optimizers.parts(self.optimizer):
            for group in part.optimizer.param_groups:
                yield from (p.data for p in group["params"])
            for state in part.optimizer.state.values():
                yield from (v for v in state.values() if isinstance(v, torch.Tensor) and v.dim() > 0)

    def _gradients(self) -> Iterator[torch.Tensor]:
        for chunk in self.chunks:
            for buffer in _buffers(chunk):
                yield buffer.grad_data


def _buffers(chunk: Any) -> list[Any]:
    return [*chunk.buffers, *chunk.expert_parallel_buffers]


def _bytes_of(storage: torch.UntypedStorage) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
