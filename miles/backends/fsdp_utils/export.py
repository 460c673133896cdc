"""Whole tensors under the names that the Hugging Face checkpoint uses, and whole directories of them."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from miles.backends.fsdp_utils.loading import LoadedPolicy, fsdp_modules, persistent_buffers
from miles.backends.training_utils.hf_directory import SafetensorsWriter, copy_companions
from miles.backends.training_utils.model_dir import checkpoint_tensor_names
from miles.utils.atomic_io import publish_dir

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


def write_hf_directory(
    loaded: LoadedPolicy, source: Path, final: Path, dtype_of: Callable[[str], torch.dtype], *, writes: bool
) -> None:
    """Export to `final`, complete or not at all: written beside it and renamed. Collective; `writes` on one rank.

    Args:
        source: the Hugging Face directory whose tokenizer and generation config go along.
    """
    temporary = final.with_name(f".{final.name}.tmp")
    writer: SafetensorsWriter | None = None
    failure: Exception | None = None
    if writes:
        try:
            shutil.rmtree(temporary, ignore_errors=True)
            temporary.mkdir(parents=True)
            writer = SafetensorsWriter(temporary)
        except OSError as error:
            failure = error
    for name, tensor in iter_hf_tensors(loaded, dtype_of, keep=writes):
        if writer is not None and failure is None:
            try:
                writer.add(name, tensor)
            except Exception as error:
                failure = error  # keep taking part in the gathers, so that the other ranks end too
    if writer is not None and failure is None:
        try:
            writer.finish()
            copy_companions(source, temporary)
            loaded.config.save_pretrained(temporary)
            publish_dir(temporary, final)
        except Exception as error:
            failure = error
    if failure is not None:
        shutil.rmtree(temporary, ignore_errors=True)
    problems: list[str | None] = [None] * dist.get_world_size()
    dist.all_gather_object(problems, None if failure is None else f"{type(failure).__name__}: {failure}")
    said = [problem for problem in problems if problem is not None]
    if said:
        raise RuntimeError(f"Hugging Face export to {final} failed, nothing was left there: {said[0]}") from failure
