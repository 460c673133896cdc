"""The trainer's view of a rollout batch, under `rollout/`: mask-weighted, and the same for any split over ranks."""

from __future__ import annotations

from typing import Any

import torch

from miles.backends.training_utils.backend import TrainShard
from miles.backends.training_utils.batching.shards import PLAN_METRICS
from miles.backends.training_utils.columns import RESPONSE_COLUMNS, MicroBatch
from miles.backends.training_utils.loss_hub.reducers import StepTotals
from miles.backends.training_utils.metrics import StepMetrics

_SCALAR_COLUMNS = ("rewards", "raw_reward", "truncated", "total_lengths", "response_lengths")


def rollout_data_metrics(args: Any, shard: TrainShard) -> StepMetrics:
    """Contributions of one rank's shard, after scoring and advantages.

    Per-token columns are averaged as the loss averages them (over rollouts, or over tokens with
    `--calculate-per-token-loss`); scalars over samples, fillers left out. `--log-correct-samples` adds
    `rollout/correct_*`, the same over samples whose raw reward is 1, each sample weighing alike.
    """
    count = len(shard.columns["tokens"])
    batch = MicroBatch.from_columns(args, shard.columns, range(count))
    totals = StepTotals(sum(s.num_rollouts for s in shard.steps), sum(s.num_tokens for s in shard.steps))
    norm = totals.normalizer(args)
    metrics = StepMetrics()
    for name in RESPONSE_COLUMNS:
        flat = batch.flat(name)
        if flat is not None:
            metrics.add(f"rollout/{name}", batch.reducer(flat) / norm)
    counted = [i for i, filler in enumerate(batch.fillers) if not filler]
    for name in _SCALAR_COLUMNS:
        column = shard.columns.get(name)
        if column is not None:
            values = torch.tensor([float(column[i]) for i in counted], dtype=torch.float64)
            metrics.add_ratio(f"rollout/{name}", values.sum(), len(counted))
    for name, value in shard.metadata.get(PLAN_METRICS, {}).items():
        metrics.add_max(name, value)
    if getattr(args, "log_correct_samples", False) and "raw_reward" in shard.columns:
        _add_correct(batch, [i for i in counted if float(shard.columns["raw_reward"][i]) == 1.0], metrics)
    return metrics


def _add_correct(batch: MicroBatch, correct: list[int], metrics: StepMetrics) -> None:
    for name in ("total_lengths", "response_lengths", "truncated"):
        column = batch.columns.get(name)
        if column is not None:
            metrics.add_ratio(f"rollout/correct_{name}", sum(float(column[i]) for i in correct), len(correct))
    trained = [i for i in correct if bool(batch.loss_masks[i].any())]
    for name in RESPONSE_COLUMNS:
        values = batch.get(name)
        if values is not None:
            means = [float(values[i][batch.loss_masks[i] > 0].double().mean()) for i in trained]
            metrics.add_ratio(f"rollout/correct_{name}", sum(means), len(trained))
