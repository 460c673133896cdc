"""What a Hugging Face model directory must have, checked before anything is built from it."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

_WEIGHT_PATTERNS = ("*.safetensors", "pytorch_model*.bin")
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt")


class ModelDirError(ValueError):
    """A model directory that cannot be loaded; the message says what is missing and which flag named it."""


def check_model_dir(path: str | Path, flag: str, *, needs_tokenizer: bool = True) -> Path:
    """Raise ModelDirError listing everything that `path`, given as `flag`, lacks."""
    directory = Path(path)
    if not directory.is_dir():
        raise ModelDirError(
            f"{flag} {path}: no such directory. Give the path of a downloaded Hugging Face model; names on the hub are not fetched."
        )
    missing = []
    if not (directory / "config.json").is_file():
        missing.append("config.json (the architecture)")
    if not any(next(directory.glob(pattern), None) for pattern in _WEIGHT_PATTERNS):
        missing.append("weights (*.safetensors or pytorch_model*.bin)")
    else:
        missing += [f"weight file {name} (listed in the index)" for name in _absent_shards(directory)]
    if needs_tokenizer and not any((directory / name).is_file() for name in _TOKENIZER_FILES):
        missing.append("a tokenizer (tokenizer.json or tokenizer.model)")
    if missing:
        raise ModelDirError(f"{flag} {path}: missing {'; '.join(missing)}. Copy the complete model directory there.")
    return directory


def _index(directory: Path) -> dict[str, Any] | None:
    for name in ("model.safetensors.index.json", "pytorch_model.bin.index.json"):
        if (directory / name).is_file():
            return json.loads((directory / name).read_text())
    return None


def _absent_shards(directory: Path) -> list[str]:
    index = _index(directory)
    files = sorted(set(index["weight_map"].values())) if index else []
    return [name for name in files if not (directory / name).is_file()]


def checkpoint_tensor_names(directory: Path) -> set[str] | None:
    """Tensor names as the directory's weight files have them; None for formats other than safetensors."""
    if not any(directory.glob("*.safetensors")):
        return None
    index = _index(directory)
    return set(index["weight_map"]) if index is not None else set(tensor_shapes(directory))


def tensor_shapes(directory: Path) -> dict[str, list[int]]:
    """Shapes by tensor name, from the headers of the safetensors files; empty for other formats."""
    shapes: dict[str, list[int]] = {}
    for file in sorted(directory.glob("*.safetensors")):
        shapes |= {name: entry["shape"] for name, entry in safetensors_header(file).items()}
    return shapes


def safetensors_header(file: Path) -> dict[str, Any]:
    """{tensor name: {"dtype", "shape", "data_offsets"}} of a safetensors file; no tensor is read."""
    with open(file, "rb") as f:
        (size,) = struct.unpack("<Q", f.read(8))
        header = json.loads(f.read(size))
    header.pop("__metadata__", None)
    return header
