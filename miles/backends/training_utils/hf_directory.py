"""Writing a Hugging Face directory: weight files of bounded size with their index, and what goes along with them."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import torch

from miles.utils.atomic_io import write_atomic

# Bytes of one weight file of an export, as transformers writes them.
SHARD_BYTES = 5 * 10**9
_COPIED = (
    "tokenizer*", "special_tokens_map.json", "added_tokens.json", "vocab.*", "merges.txt", "*.tiktoken",
    "chat_template*", "generation_config.json", "preprocessor_config.json", "*.py",
)  # fmt: skip


class SafetensorsWriter:
    """Writes tensors as they come into numbered files of bounded size, then the index."""

    def __init__(self, directory: Path, shard_bytes: int | None = None) -> None:
        self.directory, self.shard_bytes = directory, shard_bytes or SHARD_BYTES
        self._pending: dict[str, torch.Tensor] = {}
        self._pending_bytes = self._total_bytes = 0
        self._files: list[list[str]] = []

    def add(self, name: str, tensor: torch.Tensor) -> None:
        size = tensor.numel() * tensor.element_size()
        if self._pending and self._pending_bytes + size > self.shard_bytes:
            self._flush()
        self._pending[name] = tensor.detach().to("cpu", copy=True).contiguous()
        self._pending_bytes += size
        self._total_bytes += size

    def _flush(self) -> None:
        from safetensors.torch import save_file

        save_file(self._pending, self.directory / f"part-{len(self._files)}", metadata={"format": "pt"})
        self._files.append(list(self._pending))
        self._pending, self._pending_bytes = {}, 0

    def finish(self) -> None:
        if self._pending:
            self._flush()
        count = len(self._files)
        if count == 1:
            (self.directory / "part-0").rename(self.directory / "model.safetensors")
            return
        weight_map: dict[str, str] = {}
        for i, names in enumerate(self._files):
            file = f"model-{i + 1:05d}-of-{count:05d}.safetensors"
            (self.directory / f"part-{i}").rename(self.directory / file)
            weight_map |= dict.fromkeys(names, file)
        index = {"metadata": {"total_size": self._total_bytes}, "weight_map": weight_map}
        write_atomic(self.directory / "model.safetensors.index.json", json.dumps(index, indent=2))


def copy_companions(source: Path, target: Path) -> None:
    """The tokenizer and generation config of the model directory `source`."""
    for pattern in _COPIED:
        for file in sorted(source.glob(pattern)):
            if file.is_file():
                shutil.copy2(file, target / file.name)
