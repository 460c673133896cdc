"""A weight transport of a user's own, named by import path: whole checkpoints in a folder that engines read."""

from __future__ import annotations

import asyncio
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import safetensors.torch
import torch

from miles.backends.engine_api.client import EngineClient, EngineError
from miles.weight_update.buckets import FlatBucket
from miles.weight_update.errors import WeightTransferError
from miles.weight_update.transports.base import WeightTransport
from miles.weight_update.types import EngineEndpoint


class WholeCheckpoint(WeightTransport):
    """Writes what it is sent beside the model's config, and has every engine load that with `/update_weights_from_disk`."""

    def __init__(self, args: Any, source: int, num_sources: int) -> None:
        super().__init__(args, source, num_sources)
        self._tensors: dict[str, torch.Tensor] = {}

    def connect(self, engines: Sequence[EngineEndpoint]) -> None:
        self.touched, self._engines, self._tensors = frozenset(), list(engines), {}

    def send(self, bucket: FlatBucket) -> None:
        self._tensors |= {name: tensor.clone() for name, tensor in bucket.tensors()}

    def finish(self) -> None:
        with tempfile.TemporaryDirectory() as folder:
            shutil.copytree(
                self.args.hf_checkpoint, folder, ignore=shutil.ignore_patterns("*.safetensors*"), dirs_exist_ok=True
            )
            file = Path(folder) / "model.safetensors"
            safetensors.torch.save_file(self._tensors, file, metadata={"format": "pt"})
            self.touched = frozenset(e.index for e in self._engines)
            try:
                asyncio.run(self._load_everywhere(folder))
            except EngineError as error:
                raise WeightTransferError(str(error), self.touched) from error

    async def _load_everywhere(self, folder: str) -> None:
        async def load(engine: EngineEndpoint) -> None:
            async with EngineClient(engine.url, admin_key=engine.admin_key, retries=0) as client:
                await client.update_weights_from_disk(folder, timeout_s=self.args.weight_update_timeout)

        await asyncio.gather(*map(load, self._engines))

    def abandon(self) -> None:
        self._tensors = {}

    def close(self) -> None:
        self._tensors = {}
