"""What megatron-core lacks to train on CPU tensors over gloo, put in place once in a trainer's process.

megatron-core asks `torch.cuda` for its device, streams and random state, allocates on `"cuda"`, and compares tensor types
with `torch.cuda.*` names. On a machine without a GPU those calls are given CPU answers here, in the running process alone:
nothing of megatron-core's or torch's files changes. Never loaded where a GPU is.

Every name that is replaced must exist, and the version must be one that was tested: otherwise `install` says so.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
from collections.abc import Callable
from typing import Any

import torch

TESTED_VERSIONS = ("0.16.1", "0.19.2")

_FACTORIES = (
    "tensor",
    "zeros",
    "ones",
    "empty",
    "full",
    "arange",
    "rand",
    "randn",
    "empty_like",
    "zeros_like",
    "ones_like",
)

_installed = False


class AdaptationError(RuntimeError):
    """megatron-core cannot be made to run on this machine's CPU; the message says why and what to do."""


def install() -> None:
    """Adapt torch and megatron-core in this process; does nothing the second time.

    Raises: AdaptationError where a GPU is, and where megatron-core is missing or not what the adaptations know.
    """
    global _installed
    if _installed:
        return
    if torch.cuda.is_available():
        raise AdaptationError("this process sees a GPU: megatron-core runs there as it is, and is not adapted to a CPU")
    _check_version()
    replacements = [*_cuda_replacements(), *_tensor_replacements(), *_megatron_replacements()]
    missing = [f"{_name(owner)}.{name}" for owner, name, _ in replacements if not hasattr(owner, name)]
    if missing:
        raise AdaptationError(
            f"megatron-core on a CPU: {', '.join(missing)} no longer exist, so this torch {torch.__version__} or "
            "megatron-core differs from what was tested; install the versions of the `megatron` extra"
        )
    for owner, name, new in replacements:
        setattr(owner, name, new)
    _name_missing_kernels()
    _installed = True


def _check_version() -> None:
    try:
        version = importlib.import_module("megatron.core.package_info").__version__
    except ImportError as error:
        raise AdaptationError(
            f"--train-backend megatron needs megatron-core, which is not installed: pip install megatron-core=={TESTED_VERSIONS[0]}"
        ) from error
    if version not in TESTED_VERSIONS:
        raise AdaptationError(
            f"megatron-core {version} was not tested on a CPU: install one of {', '.join(TESTED_VERSIONS)}, or use a GPU"
        )


class _Stream:
    """A stream of a device that finishes everything at once."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def wait_stream(self, *args: Any) -> None:
        pass

    wait_event = synchronize = wait_stream

    def record_event(self, event: Any = None) -> Any:
        return event or _Event()


class _Event:
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def record(self, *args: Any) -> None:
        pass

    wait = synchronize = record


def _nothing(*args: Any, **kwargs: Any) -> None:
    pass


def _cuda_replacements() -> list[tuple[Any, str, Any]]:
    cuda, only_stream = torch.cuda, _Stream()
    return [
        (cuda, "current_device", lambda: "cpu"),
        (cuda, "synchronize", _nothing),
        (cuda, "set_device", _nothing),
        (cuda, "empty_cache", _nothing),
        (cuda.nvtx, "range_push", _nothing),
        (cuda.nvtx, "range_pop", _nothing),
        (cuda, "Stream", _Stream),
        (cuda, "Event", _Event),
        (cuda, "current_stream", lambda *args: only_stream),
        (cuda, "default_stream", lambda *args: only_stream),
        (cuda, "stream", lambda stream: contextlib.nullcontext()),
        (cuda, "manual_seed", torch.manual_seed),
        (cuda, "get_rng_state", lambda *args: torch.get_rng_state()),
        (cuda, "set_rng_state", lambda state, *args: torch.set_rng_state(state)),
    ]


def _tensor_replacements() -> list[tuple[Any, str, Any]]:
    def type_on_cuda(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        # The optimizers and gradient clipping compare a tensor's type with 'torch.cuda.FloatTensor'.
        return (
            plain_type(self, *args, **kwargs) if args or kwargs else plain_type(self).replace("torch.", "torch.cuda.")
        )

    def itself(self: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        return self

    plain_type = torch.Tensor.type
    methods: list[tuple[Any, str, Any]] = [
        (torch.Tensor, "type", type_on_cuda),
        (torch.Tensor, "cuda", itself),
        (torch.Tensor, "pin_memory", itself),
        (torch.Tensor, "record_stream", _nothing),
    ]
    return methods + [(torch, name, _on_cpu(getattr(torch, name))) for name in _FACTORIES]


def _on_cpu(factory: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """The factory, for which `"cuda"` means the CPU and pinned memory is ordinary."""

    @functools.wraps(factory)
    def make(*args: Any, **kwargs: Any) -> torch.Tensor:
        if str(kwargs.get("device", "")).startswith("cuda"):
            kwargs["device"] = "cpu"
        kwargs.pop("pin_memory", None)
        return factory(*args, **kwargs)

    return make


def _megatron_replacements() -> list[tuple[Any, str, Any]]:
    random = importlib.import_module("megatron.core.tensor_parallel.random")
    dispatcher = importlib.import_module("megatron.core.transformer.moe.token_dispatcher")

    def to_host(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
        # The original leaves a CPU tensor as it is also where an array is asked for, as split sizes of all-to-all.
        return tensor.numpy() if as_numpy and isinstance(tensor, torch.Tensor) else tensor

    return [
        # Their originals queue calls for the day CUDA starts.
        (random, "_get_cuda_rng_state", lambda *args, **kwargs: torch.get_rng_state()),
        (random, "_set_cuda_rng_state", lambda state, *args, **kwargs: torch.set_rng_state(state)),
        (dispatcher, "maybe_move_tensor_to_cpu", to_host),
    ]


def _name_missing_kernels() -> None:
    """Without Transformer Engine 0.16 never defines the name that its router looks at."""
    moe_utils = importlib.import_module("megatron.core.transformer.moe.moe_utils")
    if not hasattr(moe_utils, "te_general_gemm"):
        moe_utils.te_general_gemm = None  # type: ignore[attr-defined]


def _name(owner: Any) -> str:
    return getattr(owner, "__name__", type(owner).__name__)
