"""Norms for layer specs without Transformer Engine: megatron-core's own refuse sequence parallelism."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn


class RMSNorm(nn.Module):
    """Root mean square norm over the last dimension, computed in fp32.

    Under sequence parallelism each rank sees its share of the tokens, so the weight's gradient must be summed over the
    tensor-parallel ranks: the mark on the weight asks megatron-core for that.
    """

    def __init__(self, config: Any, hidden_size: int, eps: float = 1e-5, **_: Any) -> None:
        super().__init__()
        self.eps, self.hidden_size = eps, hidden_size
        # Gemma's convention: the stored weight is the distance from 1.
        self.zero_centered = bool(getattr(config, "layernorm_zero_centered_gamma", False))
        start = torch.zeros if self.zero_centered else torch.ones
        self.weight = nn.Parameter(start(hidden_size, dtype=config.params_dtype, device=_device(config)))
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weight = self.weight + 1 if self.zero_centered else self.weight
        return nn.functional.rms_norm(x, (self.hidden_size,), weight, self.eps)


class LayerNorm(nn.LayerNorm):
    """Layer norm with the same mark."""

    def __init__(self, config: Any, hidden_size: int, eps: float = 1e-5, **_: Any) -> None:
        super().__init__(hidden_size, eps=eps, dtype=config.params_dtype, device=_device(config))
        for parameter in (self.weight, self.bias):
            parameter.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]


def norm_class(config: Any) -> type[nn.Module]:
    """The norm that `config.normalization` names, for a `ModuleSpec`.

    Raises: ValueError for one that only Transformer Engine has.
    """
    classes: dict[str, type[nn.Module]] = {"RMSNorm": RMSNorm, "LayerNorm": LayerNorm}
    if config.normalization not in classes:
        raise ValueError(
            f"normalization {config.normalization} needs Transformer Engine; without it: {', '.join(classes)}"
        )
    if config.normalization == "LayerNorm" and getattr(config, "layernorm_zero_centered_gamma", False):
        raise ValueError("a zero-centered LayerNorm needs Transformer Engine")
    return classes[config.normalization]


def _device(config: Any) -> torch.device:
    on_host = config.use_cpu_initialization
    return torch.device("cpu") if on_host else torch.device("cuda", torch.cuda.current_device())
