"""One digest of a tensor, used by trainer and embedded engine alike."""

from __future__ import annotations

import torch
import xxhash


def dtype_name(dtype: torch.dtype) -> str:
    """`torch.bfloat16` -> `bfloat16`, as weight-update requests spell it."""
    return str(dtype).removeprefix("torch.")


def tensor_digest(tensor: torch.Tensor) -> str:
    """xxh3-128 of dtype, shape and the bytes in C order, as 32 hex digits. Any device; copies to the host once."""
    data = tensor.detach().contiguous().cpu()
    state = xxhash.xxh3_128(f"{dtype_name(data.dtype)}{tuple(data.shape)}".encode())
    state.update(data.reshape(-1).view(torch.uint8).numpy())  # type: ignore[arg-type]  # numpy arrays are buffers
    return state.hexdigest()
