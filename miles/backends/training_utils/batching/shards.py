"""Cut a rollout batch into one `TrainShard` a data-parallel rank, as a plan says."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from miles.backends.training_utils.backend import StepPlan, TrainData, TrainShard
from miles.backends.training_utils.batching.planner import BatchPlan

# Column that marks copies which only keep a rank busy: True for those.
FILLERS = "fillers"
# Key of a shard's metadata: the plan's own metrics, the same on every rank.
PLAN_METRICS = "batch_plan"


def split_train_data(train_data: TrainData, plan: BatchPlan, rollout_id: int) -> list[TrainShard]:
    """One shard a rank. Samples lie in the order in which they train; `fillers` marks the copies without weight.

    Sequence columns hold one entry a sample and are split; anything else is the same for all and goes to `metadata`.
    Raises: ValueError naming each column whose length is not the number of samples.
    """
    columns = {name: value for name, value in train_data.items() if _is_per_sample(value)}
    wrong = [f"{name} has {len(value)}" for name, value in columns.items() if len(value) != plan.num_samples]
    if wrong:
        raise ValueError(f"train data of {plan.num_samples} samples: column {', column '.join(wrong)} entries")
    metadata = {name: value for name, value in train_data.items() if name not in columns}
    metadata[PLAN_METRICS] = plan.metrics
    shards = []
    for rank in range(len(plan.steps[0].ranks)):
        order: list[int] = []
        fillers: list[bool] = []
        steps = []
        for step in plan.steps:
            micro_batches = []
            for mb in step.ranks[rank]:
                micro_batches.append(list(range(len(order), len(order) + len(mb.indices))))
                order.extend(mb.indices)
                fillers.extend([mb.filler] * len(mb.indices))
            steps.append(StepPlan(micro_batches, step.num_rollouts, step.num_tokens))
        local = {name: [value[i] for i in order] for name, value in columns.items()}
        local["loss_masks"] = [
            [0] * len(mask) if filler else mask for mask, filler in zip(local["loss_masks"], fillers, strict=True)
        ]
        local[FILLERS] = fillers
        shards.append(TrainShard(rollout_id, local, steps, dict(metadata)))
    return shards


def _is_per_sample(value: Any) -> bool:
    if isinstance(value, (np.ndarray, torch.Tensor)):
        return value.ndim > 0
    return isinstance(value, Sequence) and not isinstance(value, (str, bytes))
