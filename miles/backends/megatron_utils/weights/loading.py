"""Filling a model from a Hugging Face directory: each rank reads what it holds."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from miles.backends.megatron_utils.weights.checkpoint_files import HFDirectory
from miles.backends.megatron_utils.weights.plan import WeightPlan


@torch.no_grad()
def load_weights(plan: WeightPlan, directory: HFDirectory, into: Callable[[int, str], Tensor] | None = None) -> None:
    """Copy `directory`'s tensors into the planned ones, converted to their dtype.

    Args:
        directory: of the model of the plan, or another of equal names and shapes (a reference model).
        into: (chunk, parameter name) -> where to copy instead, a tensor of the parameter's shape.
    """
    for item in plan.tensors:
        target = item.local.tensor if into is None else into(item.local.chunk, item.local.name)
        sources = [directory.tensors[name] for name in item.mapping.hf_names()]
        target.copy_(item.transform.read(sources, item.shard))
    directory.close()
