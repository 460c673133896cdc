"""Tensors inside JSON: safetensors bytes, or SGLang's pickles read through an allow-list."""

from __future__ import annotations

import base64
import binascii
import io
import pickle
import types
from dataclasses import dataclass
from typing import Any

import torch
from torch.multiprocessing import reductions

from miles.backends.embedded_engine.weight_sync import NamedTensors, TensorSpec, split_bucket
from miles.backends.embedded_engine.weights import WeightError


@dataclass
class FlattenedTensorMetadata:
    """Stands in for SGLang's class of this name when its pickles are read."""

    name: str = ""
    shape: Any = ()
    dtype: Any = None
    start_idx: int = 0
    end_idx: int = 0
    numel: int = 0


# What a pickle of named tensors refers to. Anything else could run code, so it is refused.
_ALLOWED: dict[tuple[str, str], Any] = {
    ("sglang.srt.weight_sync.tensor_bucket", "FlattenedTensorMetadata"): FlattenedTensorMetadata,
    ("sglang.srt.model_executor.model_runner", "FlattenedTensorMetadata"): FlattenedTensorMetadata,
    ("torch", "Size"): torch.Size,
    ("collections", "OrderedDict"): dict,
    ("builtins", "list"): list,
    ("builtins", "dict"): dict,
    ("builtins", "tuple"): tuple,
    ("types", "SimpleNamespace"): types.SimpleNamespace,
}
_ALLOWED_TORCH = {
    "torch.multiprocessing.reductions": {"rebuild_tensor", "rebuild_storage_filename", "rebuild_typed_storage"},
    "torch._utils": {"_rebuild_tensor_v2", "_rebuild_tensor"},
    "torch.storage": {"_load_from_bytes", "UntypedStorage", "TypedStorage"},
    "torch": {"device", "Tensor", "UntypedStorage"}
    | {
        str(d).removeprefix("torch.")
        for d in (
            torch.float32,
            torch.bfloat16,
            torch.float16,
            torch.uint8,
            torch.int64,
            torch.int32,
            torch.bool,
            torch.float64,
        )
    },
}


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in _ALLOWED:
            return _ALLOWED[module, name]
        if name == "_load_from_bytes":
            return lambda data: torch.load(io.BytesIO(data), weights_only=True)
        if (module, name) == ("torch.multiprocessing.reductions", "rebuild_cuda_tensor"):
            return _rebuild_cuda_tensor
        if name in _ALLOWED_TORCH.get(module, ()):
            return super().find_class(module, name)
        raise WeightError(f"the payload refers to {module}.{name}, which is not on the list of what tensors need")


def _rebuild_cuda_tensor(*arguments: Any) -> torch.Tensor:
    """torch's own, where the sender may name its GPU by UUID: this process may number the GPUs in another way."""
    rebuild: Any = reductions.rebuild_cuda_tensor
    place = 6  # of the device among the arguments
    found = arguments[place]
    if isinstance(found, str):
        known = [str(torch.cuda.get_device_properties(i).uuid) for i in range(torch.cuda.device_count())]
        if found not in known:
            raise WeightError(f"the tensors are on GPU {found}, and this engine sees {', '.join(known) or 'none'}")
        found = known.index(found)
    return rebuild(*arguments[:place], found, *arguments[place + 1 :])


def decode_tensors(payload: str, load_format: str | None, device: torch.device) -> NamedTensors:
    """Read one element of `serialized_named_tensors`.

    Accepted: base64 of safetensors bytes, or of a pickle of `[(name, tensor), ...]` or of a flattened bucket
    `{"flattened_tensor": uint8, "metadata": [...]}`. Raises: WeightError for anything else.
    """
    try:
        data = base64.b64decode(payload, validate=True)
    except (binascii.Error, ValueError) as error:
        raise WeightError(f"serialized_named_tensors is not base64: {error}") from None
    if data[:1] == b"\x80":
        content = _unpickle(data)
    else:
        content = _safetensors(data)
    if load_format == "flattened_bucket" or (isinstance(content, dict) and "flattened_tensor" in content):
        content = _from_bucket(content)
    try:
        return [(str(name), tensor.to(device)) for name, tensor in content]
    except (TypeError, ValueError, AttributeError):
        raise WeightError("the payload is neither (name, tensor) pairs nor a flattened bucket") from None


def _safetensors(data: bytes) -> Any:
    from safetensors import SafetensorError
    from safetensors.torch import load

    try:
        return list(load(data).items())
    except SafetensorError as error:
        raise WeightError(f"the payload is neither a pickle nor safetensors: {error}") from None


def _unpickle(data: bytes) -> Any:
    try:
        return _Unpickler(io.BytesIO(data)).load()
    except WeightError:
        raise
    except Exception as error:
        raise WeightError(f"the pickled payload cannot be read: {type(error).__name__}: {error}") from error


def _from_bucket(content: Any) -> NamedTensors:
    try:
        flat = content["flattened_tensor"].view(torch.uint8).reshape(-1)
        specs = [
            TensorSpec(m.name, _dtype(m.dtype), tuple(m.shape))
            for m in sorted(content["metadata"], key=lambda m: m.start_idx)
        ]
    except (KeyError, TypeError, AttributeError) as error:
        raise WeightError(f"malformed flattened bucket: {type(error).__name__}: {error}") from None
    return split_bucket(flat, specs)


def _dtype(value: Any) -> torch.dtype:
    dtype = value if isinstance(value, torch.dtype) else getattr(torch, str(value).removeprefix("torch."), None)
    if not isinstance(dtype, torch.dtype):
        raise WeightError(f"unknown dtype {value!r} in a flattened bucket")
    return dtype
