"""The one batch planner: which samples train together, in which optimizer step, on which rank, in which micro-batch.

1. Samples group by rollout id, in first-seen order: siblings of one execution are never parted over steps.
2. A step is `--global-batch-size` rollouts.
3. In a step, samples form micro-batches: at most `--max-tokens-per-gpu` tokens each with `--use-dynamic-batch-size`,
   else `--micro-batch-size` samples each.
4. Every rank gets equally many micro-batches, none empty: the largest are split, and where only singletons are left a
   filler, a copy of a short sample with its loss mask zeroed, keeps the rank busy. Fillers enter no sum and no count.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from miles.backends.training_utils.backend import TrainData, TrainParallelConfig
from miles.backends.training_utils.batching.bins import (
    balanced_bins_under_cap,
    first_fit_decreasing,
    karmarkar_karp,
    split_to_multiple,
)
from miles.backends.training_utils.batching.flops import ModelDims, sequence_flops

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class PlannedMicroBatch:
    """Samples that go through one forward pass, as indices into the rollout batch. A filler weighs nothing."""

    indices: list[int]
    filler: bool = False


@dataclass(frozen=True)
class PlannedStep:
    """One optimizer step: `ranks[dp_rank]` lists that rank's micro-batches, equally many on every rank.

    `num_rollouts` and `num_tokens` (trainable tokens) are totals over ranks, fillers excluded.
    """

    ranks: list[list[PlannedMicroBatch]]
    num_rollouts: int
    num_tokens: int


@dataclass(frozen=True)
class BatchPlan:
    """The steps of one rollout batch.

    `dropped`: samples of trailing rollouts that fill no step. `oversize`: samples longer than the cap, each alone.
    """

    steps: list[PlannedStep]
    num_samples: int
    dropped: list[int] = field(default_factory=list)
    oversize: list[int] = field(default_factory=list)

    @property
    def num_fillers(self) -> int:
        return sum(mb.filler for step in self.steps for rank in step.ranks for mb in rank)

    @property
    def metrics(self) -> dict[str, float]:
        return {
            "rollout/batch/samples_dropped": float(len(self.dropped)),
            "rollout/batch/samples_over_token_cap": float(len(self.oversize)),
            "rollout/batch/fillers": float(self.num_fillers),
        }


def plan_batches(train_data: TrainData, parallel: TrainParallelConfig, args: Any) -> BatchPlan:
    """Plan the optimizer steps of a rollout batch.

    Args:
        train_data: the columns; `total_lengths`, `loss_masks` and `rollout_ids` are read.
        parallel: the trainer's layout.
        args: batch flags (`global_batch_size`, `micro_batch_size`, `use_dynamic_batch_size`, `max_tokens_per_gpu`,
            `balance_data`, `balance_by_flops`, `allow_partial_train_step`, `use_dynamic_global_batch_size`).
    Returns: a plan in which every sample of a step occurs exactly once, fillers aside.
    Raises: ValueError, naming the flag, where the batch fills no step.
    """
    lengths = [int(n) for n in train_data["total_lengths"]]
    if not lengths:
        raise ValueError("the rollout batch has no samples: nothing to train on")
    rollouts = _group_by_rollout(train_data, len(lengths))
    sizes = _step_sizes(len(rollouts), _rollouts_per_step(train_data, len(rollouts), args), args)
    weights = _balance_weights(lengths, args)
    cap = _token_cap(parallel, args)
    steps, start = [], 0
    for size in sizes:
        members = rollouts[start : start + size]
        start += size
        samples = [index for rollout in members for index in rollout]
        tokens = sum(int(np.asarray(train_data["loss_masks"][index]).sum()) for index in samples)
        ranks = _plan_step(samples, lengths, weights, cap, parallel, args)
        steps.append(PlannedStep(ranks, len(members), tokens))
    dropped = [index for rollout in rollouts[start:] for index in rollout]
    kept = {index for rollout in rollouts[:start] for index in rollout}
    oversize = [i for i in sorted(kept) if cap is not None and lengths[i] > cap]
    if dropped:
        logger.warning("%d samples of trailing rollouts fill no optimizer step and are not trained", len(dropped))
    if oversize:
        shown = ", ".join(f"{i} ({lengths[i]} tokens)" for i in oversize[:5])
        logger.warning("%d samples exceed the cap of %s tokens and run alone: %s", len(oversize), cap, shown)
    return BatchPlan(steps, len(lengths), dropped, oversize)


def _group_by_rollout(train_data: TrainData, count: int) -> list[list[int]]:
    ids = train_data.get("rollout_ids")
    groups: dict[Any, list[int]] = {}
    for index in range(count):
        groups.setdefault(index if ids is None else int(ids[index]), []).append(index)
    return list(groups.values())


def _rollouts_per_step(train_data: TrainData, num_rollouts: int, args: Any) -> int:
    if getattr(args, "use_dynamic_global_batch_size", False):
        size = train_data.get("dynamic_global_batch_size")
        if size is not None:
            return int(size)
        return max(1, num_rollouts // (getattr(args, "num_steps_per_rollout", None) or 1))
    return int(args.global_batch_size)


def _step_sizes(num_rollouts: int, per_step: int, args: Any) -> list[int]:
    full, rest = divmod(num_rollouts, per_step)
    sizes = [per_step] * full
    if rest and getattr(args, "allow_partial_train_step", False):
        sizes.append(rest)
    if not sizes:
        raise ValueError(
            f"the rollout batch has {num_rollouts} rollouts, fewer than --global-batch-size {per_step}: lower it, "
            "generate more, or let the step be smaller with --allow-partial-train-step"
        )
    return sizes


def _token_cap(parallel: TrainParallelConfig, args: Any) -> int | None:
    """Tokens a micro-batch may hold over all context-parallel ranks; None when batches are static."""
    if not getattr(args, "use_dynamic_batch_size", False):
        return None
    if not getattr(args, "max_tokens_per_gpu", None):
        raise ValueError(
            "--use-dynamic-batch-size needs --max-tokens-per-gpu, the tokens that one micro-batch may hold"
        )
    return int(args.max_tokens_per_gpu) * parallel.cp_size


def _balance_weights(lengths: Sequence[int], args: Any) -> list[float]:
    if not getattr(args, "balance_by_flops", False):
        return [float(n) for n in lengths]
    if not getattr(args, "use_dynamic_batch_size", False):
        raise ValueError("--balance-by-flops balances dynamic micro-batches: set --use-dynamic-batch-size too")
    dims = ModelDims.from_hf_directory(args.hf_checkpoint)
    return [sequence_flops(n, dims) for n in lengths]


def _plan_step(
    samples: list[int],
    lengths: Sequence[int],
    weights: Sequence[float],
    cap: int | None,
    parallel: TrainParallelConfig,
    args: Any,
) -> list[list[PlannedMicroBatch]]:
    group = parallel.microbatch_group_size if parallel.vpp_size > 1 else 1
    sizes, heft = [lengths[i] for i in samples], [weights[i] for i in samples]
    if cap is None:
        size = int(args.micro_batch_size)
        bins = [list(range(i, min(i + size, len(samples)))) for i in range(0, len(samples), size)]
    elif getattr(args, "balance_by_flops", False):
        bins = balanced_bins_under_cap(sizes, heft, cap)
    else:
        bins = first_fit_decreasing(sizes, cap)
    bins = split_to_multiple(bins, heft, parallel.dp_size * group)
    planned = [PlannedMicroBatch([samples[i] for i in b]) for b in bins]
    shortest = min(samples, key=lambda i: (lengths[i], i))
    while len(planned) % (parallel.dp_size * group):
        planned.append(PlannedMicroBatch([shortest], filler=True))
    return _distribute(planned, weights, parallel.dp_size, args)


def _distribute(
    planned: list[PlannedMicroBatch], weights: Sequence[float], dp_size: int, args: Any
) -> list[list[PlannedMicroBatch]]:
    """Deal micro-batches to ranks; with balancing, equal counts of near-equal total weight.

    Each rank runs its heaviest first, so that micro-batches that meet at a collective are of a size.
    """
    totals = [sum(weights[i] for i in mb.indices) for mb in planned]
    if getattr(args, "balance_data", False) or getattr(args, "balance_by_flops", False):
        ranks = karmarkar_karp(totals, dp_size, equal_count=True)
        ranks = [sorted(rank, key=lambda slot: (-totals[slot], slot)) for rank in ranks]
    else:
        ranks = [list(range(rank, len(planned), dp_size)) for rank in range(dp_size)]
    return [[planned[slot] for slot in rank] for rank in ranks]
