"""The tensors of a Hugging Face directory, by name, of which slices can be read without reading the rest."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from miles.backends.megatron_utils.weights.transforms import Shape
from miles.backends.training_utils.model_dir import ModelDirError, safetensors_header

_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
}
# All experts of a layer in one tensor, as transformers 5 holds them in memory: [experts, out, in], gate above up.
_FUSED = re.compile(r"^(?P<prefix>.*\.experts\.)(?P<kind>gate_up_proj|down_proj)$")


@dataclass(frozen=True)
class StoredTensor:
    """A tensor in a file, or a part of one: `index` of its first dimension, then rows `rows` of what is left."""

    directory: HFDirectory
    stored_name: str
    file: Path
    shape: Shape
    dtype: torch.dtype
    index: int | None = None
    rows: tuple[int, int] | None = None

    def read(self, dim: int = 0, start: int = 0, end: int | None = None) -> Tensor:
        """Its part `start:end` along `dim`, on the CPU."""
        if not self.shape:
            return self.directory.slices(self.file, self.stored_name)[:]
        stop = self.shape[dim] if end is None else end
        spans = [slice(0, n) for n in self.shape]
        spans[dim] = slice(start, stop)
        if self.rows is not None:
            spans[0] = slice(spans[0].start + self.rows[0], spans[0].stop + self.rows[0])
        stored = self.directory.slices(self.file, self.stored_name)
        if start >= stop:
            return torch.empty([s.stop - s.start for s in spans], dtype=self.dtype)
        if self.index is None:
            return stored[tuple(spans)]
        return stored[(slice(self.index, self.index + 1), *spans)][0]


class HFDirectory:
    """`tensors`: everything in the directory's safetensors files. Headers are read at once, data when it is asked for.

    Fused experts appear as one tensor an expert and projection, under the names that other checkpoints store them.
    """

    def __init__(self, path: str | Path) -> None:
        """Raises: ModelDirError where there are no safetensors files, or not all that the index lists."""
        self.path = Path(path)
        self.tensors: dict[str, StoredTensor] = {}
        self._open: dict[Path, Any] = {}
        for file in self._files():
            for name, entry in safetensors_header(file).items():
                self._add(name, file, tuple(entry["shape"]), entry["dtype"])

    def _files(self) -> list[Path]:
        index = self.path / "model.safetensors.index.json"
        if index.is_file():
            files = sorted({self.path / name for name in json.loads(index.read_text())["weight_map"].values()})
        else:
            files = sorted(self.path.glob("*.safetensors"))
        if not files:
            raise ModelDirError(
                f"{self.path} has no *.safetensors files, which is what the Megatron trainer reads: convert the model with "
                "transformers' save_pretrained, or use --train-backend fsdp"
            )
        if absent := [file.name for file in files if not file.is_file()]:
            raise ModelDirError(f"{self.path}: missing weight files that the index lists: {', '.join(absent)}")
        return files

    def _add(self, name: str, file: Path, shape: Shape, kind: str) -> None:
        dtype = _DTYPES.get(kind, torch.int64)  # what is no float is no weight, and is reported as unknown by name
        fused = _FUSED.match(name)
        if fused is None or len(shape) != 3:
            self.tensors[name] = StoredTensor(self, name, file, shape, dtype)
            return
        experts, height, width = shape
        parts = {"down_proj": (0, height)}
        if fused["kind"] == "gate_up_proj":
            parts = {"gate_proj": (0, height // 2), "up_proj": (height // 2, height)}
        for expert in range(experts):
            for part, (first, last) in parts.items():
                own = (last - first, width)
                self.tensors[f"{fused['prefix']}{expert}.{part}.weight"] = StoredTensor(
                    self, name, file, own, dtype, expert, (first, last)
                )

    def slices(self, file: Path, name: str) -> Any:
        """safetensors' lazy view of a stored tensor; files stay open until `close`."""
        if file not in self._open:
            from safetensors import safe_open

            self._open[file] = safe_open(file, framework="pt")
        return self._open[file].get_slice(name)

    def close(self) -> None:
        self._open.clear()
