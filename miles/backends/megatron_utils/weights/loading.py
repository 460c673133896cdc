"""Filling a model from a Hugging Face directory: each rank reads what it holds."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from miles.backends.megatron_utils.weights.checkpoint_files import HFDirectory
from miles.backends.megatron_utils.weights.name_map import NameMapError
from miles.backends.megatron_utils.weights.plan import WeightPlan


@torch.no_grad()
def load_weights(plan: WeightPlan, directory: HFDirectory, into: Callable[[int, str], Tensor] | None = None) -> None:
    """Copy `directory`'s tensors into the planned ones, converted to their dtype.

    Args:
        directory: of the model of the plan, or another of equal names and shapes (a reference model).
        into: (chunk, parameter name) -> where to copy instead, a tensor of the parameter's shape.
    Raises: NameMapError, on every rank, listing how another directory differs.
    """
    _check_alike(plan, directory)
    for item in plan.tensors:
        target = item.local.tensor if into is None else into(item.local.chunk, item.local.name)
        sources = [directory.tensors[name] for name in item.mapping.hf_names()]
        target.copy_(item.transform.read(sources, item.shard))
    directory.close()


def _check_alike(plan: WeightPlan, directory: HFDirectory) -> None:
    """All ranks look at the whole model, so that they agree."""
    problems = []
    for name, shape in plan.shapes.items():
        stored = directory.tensors.get(name)
        if stored is None:
            problems.append(f"it lacks {name}")
        elif stored.shape != shape:
            problems.append(f"{name} has shape {list(stored.shape)} instead of {list(shape)}")
    if problems:
        listed = "\n  ".join(problems)
        raise NameMapError(f"{directory.path} is not a model like {plan.source}:\n  {listed}")
