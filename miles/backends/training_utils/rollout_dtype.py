"""The type that the engines serve weights in, as far as flags say."""

from __future__ import annotations

from typing import Any

import torch

_DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
_DTYPES |= {"bf16": torch.bfloat16, "fp16": torch.float16, "half": torch.float16, "float": torch.float32}


def rollout_dtype(args: Any) -> torch.dtype | None:
    """The dtype that engines serve in, where a flag says so; None for the checkpoint's own, which is what they load."""
    flags = (
        ("embedded_dtype", "sglang_dtype") if getattr(args, "rollout_engine", None) != "sglang" else ("sglang_dtype",)
    )
    for flag in flags:
        name = getattr(args, flag, None)
        if name and name != "auto":
            return _DTYPES[name]
    return None
