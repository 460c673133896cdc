"""Whole tensors under the names that the Hugging Face checkpoint uses."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from miles.backends.fsdp_utils.loading import LoadedPolicy, fsdp_modules, persistent_buffers
from miles.backends.training_utils.model_dir import checkpoint_tensor_names

logger = logging.getLogger(__name__)

_PREFIX = "hf."


def to_checkpoint_names(hf: Any, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Rename and split a layer's tensors as the checkpoint stores them (fused experts become one tensor an expert)."""
    from transformers.core_model_loading import revert_weight_conversion

    return {name: _only(value) for name, value in revert_weight_conversion(hf, tensors).items()}


def _only(value: Any) -> torch.Tensor:
    return value[0] if isinstance(value, list) else value


def iter_hf_tensors(
    loaded: LoadedPolicy, dtype_of: Callable[[str], torch.dtype], *, keep: bool
) -> Iterator[tuple[str, torch.Tensor]]:
    """(name, whole tensor) of every parameter and stored buffer, a tied one once. Collective: all ranks exhaust it.

    One FSDP group is gathered at a time, unless the model keeps its parameters gathered anyway.

    Args:
        dtype_of: parameter name -> the dtype to yield it in.
        keep: whether this rank uses the values; tensors are empty otherwise.
    """
    policy = loaded.module
    buffers = persistent_buffers(policy)
    for module in fsdp_modules(policy):
        names = _own_tensors(policy, module, buffers)
        if not names:
            continue
        gathered = _can_gather(module, names, dtype_of)
        if gathered:
            module.unshard()
        tensors: dict[str, torch.Tensor] = {}
        for name in names:
            value = (policy.get_buffer if name in buffers else policy.get_parameter)(name).detach()
            value = value.full_tensor() if isinstance(value, DTensor) else value
            name = name.removeprefix(_PREFIX)
            # Ranks that only take part in the gathers name their tensors without touching them.
            target = value.device if keep else "meta"
            tensors[name] = value.to(target, dtype_of(name), copy=gathered and not loaded.stays_gathered)
        if gathered and not loaded.stays_gathered:
            module.reshard()  # frees the gathered storage: what is yielded are copies
        for name, tensor in to_checkpoint_names(policy.hf, tensors).items():
            yield name, tensor if keep else torch.empty(0, dtype=tensor.dtype)


def _own_tensors(policy: nn.Module, module: FSDPModule, buffers: dict[str, torch.Tensor]) -> list[str]:
    """Names of what belongs to `module`'s FSDP group: parameters and stored buffers that no inner group has."""
    groups = {name: m for name, m in policy.named_modules() if isinstance(m, FSDPModule)}
    prefix = next(f"{name}." if name else "" for name, m in groups.items() if m is module)
    inner = tuple(f"{name}." for name in groups if name.startswith(prefix) and f"{name}." != prefix and name)
    names = [name for name, _ in policy.named_parameters()] + list(buffers)
    return [name for name in names if name.startswith(prefix) and not name.startswith(inner)]


def _can_gather(module: FSDPModule, names: list[str], dtype_of: Callable[[str], torch.dtype]) -> bool:
    """Whether FSDP's own gather, in the compute dtype, loses nothing that the wanted dtype would keep."""
    compute = module._get_fsdp_state()._mp_policy.param_dtype
    return compute is None or all(dtype_of(name.removeprefix(_PREFIX)) == compute for name in names)


def names_unlike_checkpoint(loaded: LoadedPolicy, directory: Path) -> str | None:
    """How exported names differ from those in the directory's weight files; None where they do not, or cannot be read."""
    theirs = checkpoint_tensor_names(directory)
    if theirs is None:
        return None
    named = dict(loaded.module.named_parameters()) | persistent_buffers(loaded.module)
    blank = {n.removeprefix(_PREFIX): torch.empty(t.shape, dtype=t.dtype, device="meta") for n, t in named.items()}
    ours = to_checkpoint_names(loaded.module.hf, blank).keys()
    differences = [f"{name} is exported and not there" for name in sorted(ours - theirs)]
    differences += [f"{name} is there and not exported" for name in sorted(theirs - ours)]
    return f"{len(differences)} names differ: {'; '.join(differences[:5])}" if differences else None
