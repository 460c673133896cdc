"""The machine that the Megatron trainer runs on, decided once: device, collectives, and what its kernels can do."""

from __future__ import annotations

import functools
import importlib.util
from dataclasses import dataclass, field
from typing import Any

import torch

from miles.backends.megatron_utils import cpu_adaptations

# Fused kernels that need CUDA extensions, or that torch.compile would build in C++ for half a minute.
_UNFUSED = {
    "gradient_accumulation_fusion": False,
    "masked_softmax_fusion": False,
    "apply_rope_fusion": False,
    "persist_layer_norm": False,
    "moe_grouped_gemm": False,
    "moe_permute_fusion": False,
}
_CPU = _UNFUSED | {
    # Weights drawn on the CPU carry their tensor-parallel marks only if they are really initialised
    # (perform_initialization): without the marks gradient norms count replicated tensors once a rank.
    "use_cpu_initialization": True,
    "perform_initialization": True,
    "bias_activation_fusion": False,
    "bias_dropout_fusion": False,
    "cross_entropy_loss_fusion": False,
    "batch_p2p_sync": False,
}
_GPU = {"use_cpu_initialization": False, "perform_initialization": True}


@dataclass(frozen=True)
class Platform:
    """`config_overrides` are fields of `TransformerConfig` that this machine decides, whatever the flags say."""

    device: torch.device
    backend: str  # of torch.distributed, for tensors on `device`
    has_transformer_engine: bool
    config_overrides: dict[str, Any] = field(default_factory=dict)

    @property
    def is_cpu(self) -> bool:
        return self.device.type == "cpu"


@functools.cache
def choose_platform(kind: str | None = None) -> Platform:
    """The platform for `--train-device` (None: a GPU where one is). On a CPU this adapts megatron-core in the process.

    Raises: ValueError for a GPU that is not there; AdaptationError where megatron-core cannot be adapted.
    """
    wanted = kind or ("cuda" if torch.cuda.is_available() else "cpu")
    if wanted == "cuda":
        if not torch.cuda.is_available():
            raise ValueError("--train-device cuda: this process sees no GPU; use --train-device cpu")
        te = importlib.util.find_spec("transformer_engine") is not None
        device = torch.device("cuda", torch.cuda.current_device())
        return Platform(device, "nccl", te, _GPU if te else _UNFUSED | _GPU)
    cpu_adaptations.install()
    return Platform(torch.device("cpu"), "gloo", False, dict(_CPU))
