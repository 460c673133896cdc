"""Writing a Hugging Face directory: weight files of bounded size with their index, and what goes along with them."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from miles.backends.training_utils.agreement import gather_objects
from miles.utils.atomic_io import publish_dir, write_atomic

# Bytes of one weight file of an export, as transformers writes them.
SHARD_BYTES = 5 * 10**9
_COPIED = (
    "tokenizer*", "special_tokens_map.json", "added_tokens.json", "vocab.*", "merges.txt", "*.tiktoken",
    "chat_template*", "generation_config.json", "preprocessor_config.json", "*.py",
)  # fmt: skip


@dataclass(frozen=True)
class Part:
    """A weight file that has no final name yet."""

    file: str
    names: tuple[str, ...]
    nbytes: int


class SafetensorsWriter:
    """Writes tensors as they come into files of bounded size; `prefix` tells several writers of one directory apart."""

    def __init__(self, directory: Path, shard_bytes: int | None = None, prefix: str = "part") -> None:
        self.directory, self.shard_bytes, self.prefix = directory, shard_bytes or SHARD_BYTES, prefix
        self._pending: dict[str, torch.Tensor] = {}
        self._pending_bytes = 0
        self._parts: list[Part] = []

    def add(self, name: str, tensor: torch.Tensor) -> None:
        size = tensor.numel() * tensor.element_size()
        if self._pending and self._pending_bytes + size > self.shard_bytes:
            self._flush()
        self._pending[name] = tensor.detach().to("cpu", copy=True).contiguous()
        self._pending_bytes += size

    def _flush(self) -> None:
        from safetensors.torch import save_file

        part = Part(f"{self.prefix}-{len(self._parts)}", tuple(self._pending), self._pending_bytes)
        save_file(self._pending, self.directory / part.file, metadata={"format": "pt"})
        self._parts.append(part)
        self._pending, self._pending_bytes = {}, 0

    def parts(self) -> list[Part]:
        """Write what is pending; returns all files."""
        if self._pending:
            self._flush()
        return self._parts


def name_parts(directory: Path, parts: Sequence[Part]) -> None:
    """Give the files of all writers their final names, and write the index where there are several."""
    if len(parts) == 1:
        (directory / parts[0].file).rename(directory / "model.safetensors")
        return
    weight_map: dict[str, str] = {}
    for i, part in enumerate(parts):
        file = f"model-{i + 1:05d}-of-{len(parts):05d}.safetensors"
        (directory / part.file).rename(directory / file)
        weight_map |= dict.fromkeys(part.names, file)
    index = {"metadata": {"total_size": sum(part.nbytes for part in parts)}, "weight_map": weight_map}
    write_atomic(directory / "model.safetensors.index.json", json.dumps(index, indent=2))


def write_hf_directory(
    tensors: Iterable[tuple[str, torch.Tensor]],
    source: Path,
    final: Path,
    save_config: Callable[[Path], Any],
    *,
    writes: bool,
) -> None:
    """Export to `final`, complete or not at all: written beside it and renamed. Collective.

    Args:
        tensors: of this rank, which is run to its end on every rank; kept where `writes`.
        source: the Hugging Face directory whose tokenizer and generation config go along.
        save_config: writes config.json below a directory.
        writes: on one rank, or on several that have different tensors and see one file system.
    Raises: RuntimeError on every rank, with what failed first; nothing is then left at `final`.
    """
    temporary = final.with_name(f".{final.name}.tmp")
    rank = dist.get_rank()
    leads = rank == min(r for r, w in enumerate(gather_objects(writes)) if w)
    failure: Exception | None = None
    if leads:
        try:
            shutil.rmtree(temporary, ignore_errors=True)
            temporary.mkdir(parents=True)
        except OSError as error:
            failure = error
    dist.barrier()
    writer = SafetensorsWriter(temporary, prefix=f"part-{rank:05d}") if writes else None
    for name, tensor in tensors:
        if writer is not None and failure is None:
            try:
                writer.add(name, tensor)
            except Exception as error:
                failure = error  # keep taking part in the gathers, so that the other ranks end too
    parts: list[Part] = []
    if writer is not None and failure is None:
        try:
            parts = writer.parts()
        except Exception as error:
            failure = error
    written = gather_objects((parts, failure is not None))
    if leads and not any(failed for _, failed in written):
        try:
            name_parts(temporary, [part for parts, _ in written for part in parts])
            copy_companions(source, temporary)
            save_config(temporary)
            publish_dir(temporary, final)
        except Exception as error:
            failure = error
    said = [
        text for text in gather_objects(None if failure is None else f"{type(failure).__name__}: {failure}") if text
    ]
    if said:
        if leads:
            shutil.rmtree(temporary, ignore_errors=True)
        raise RuntimeError(f"Hugging Face export to {final} failed, nothing was left there: {said[0]}") from failure


def copy_companions(source: Path, target: Path) -> None:
    """The tokenizer and generation config of the model directory `source`."""
    for pattern in _COPIED:
        for file in sorted(source.glob(pattern)):
            if file.is_file():
                shutil.copy2(file, target / file.name)
