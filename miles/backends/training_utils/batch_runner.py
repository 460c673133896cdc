"""A rollout batch becomes optimizer steps: score, advantages, then forward, backward and step. The same for every trainer.

A trainer brings what depends on how its model is spread: `BatchRunner`'s abstract methods.
"""

from __future__ import annotations

import contextlib
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from miles.backends.training_utils.advantages import compute_advantages
from miles.backends.training_utils.agreement import gather_objects
from miles.backends.training_utils.backend import StepPlan, TrainShard
from miles.backends.training_utils.batching.flops import ModelDims
from miles.backends.training_utils.columns import MicroBatch, check_columns
from miles.backends.training_utils.finite import check_step_is_finite, nonfinite_samples
from miles.backends.training_utils.loss_hub.base import Objective
from miles.backends.training_utils.loss_hub.corrections import local_step_sums, needs_step_sums
from miles.backends.training_utils.loss_hub.reducers import StepTotals
from miles.backends.training_utils.loss_hub.sft_loss import sft_objective
from miles.backends.training_utils.lr_schedule import LRSchedule
from miles.backends.training_utils.metrics import StepMetrics
from miles.backends.training_utils.objective import policy_objective
from miles.backends.training_utils.rollout_metrics import rollout_data_metrics
from miles.backends.training_utils.scoring import ScoringPlan, plan_scoring
from miles.backends.training_utils.throughput import batch_flops, peak_tflops, throughput_metrics
from miles.utils.imports import load_function

# (shard, tag, with_entropy=...) -> log-probs and entropies, one tensor a sample.
Score = Callable[..., tuple[list[Tensor], list[Tensor]]]


class Copies(Protocol):
    """Weights under names that follow the run: the rollout's own, a moving reference."""

    def before_rollout(self) -> None: ...

    def after_rollout(self, rollout_id: int) -> None: ...


class BatchRunner(ABC):
    """Trains one model on rollout batches; every method is collective."""

    def __init__(self, args: Any, schedule: LRSchedule, device: torch.device) -> None:
        self.args, self.schedule, self.device = args, schedule, device
        self.postprocess = load_function(getattr(args, "rollout_data_postprocess_path", None))
        self.dims = model_dims(args.hf_checkpoint)
        name = torch.cuda.get_device_name(device) if device.type == "cuda" else None
        self.peak_tflops = peak_tflops(args, name)
        self.times: dict[str, float] = {}
        self.correction_sums: Tensor | None = None
        self.trained_log_probs: dict[int, Tensor] = {}  # of the training pass, where they are the old ones too
        # fp16 gradients of small losses underflow: they are computed from a larger loss, and divided again.
        self.loss_scale = 4096.0 if getattr(args, "fp16", False) else 1.0

    # ---- what a trainer brings -----------------------------------------------------------------------------------

    @abstractmethod
    def accumulate_gradients(self, shard: TrainShard, step: StepPlan, *, old_is_current: bool) -> StepMetrics:
        """Forward and backward over a step's micro-batches.

        Leaves the step's whole gradient, summed over ranks, where `clip_gradients` finds it. Returns this rank's
        contributions to the metrics.
        """

    @abstractmethod
    def clip_gradients(self) -> float:
        """Scale gradients to `--clip-grad`; returns their global norm before."""

    @abstractmethod
    def take_step(self) -> None:
        """Move the weights by the gradients, which are finite."""

    @abstractmethod
    def drop_gradients(self) -> None:
        """Forget the gradients."""

    @abstractmethod
    def reset_optimizer(self) -> None:
        """Forget the optimizer's moments (`--reset-optimizer-states`)."""

    @abstractmethod
    def has_dropout(self) -> bool:
        """Whether two training passes of the same weights differ."""

    def gather(self, vector: Tensor) -> Tensor:
        """`[n]` of every rank that holds other samples, as `[ranks, n]`."""
        return all_gather_vector(vector)

    def reduce(self, metrics: StepMetrics) -> dict[str, float]:
        """The values of a step's metrics, the same on every rank."""
        return metrics.reduce(self.gather)

    def before_step(self, rollout_id: int, step: int) -> None:
        """Called before each optimizer step."""

    # ---- one rollout batch ---------------------------------------------------------------------------------------

    def run(self, shard: TrainShard, score: Score, copies: Copies) -> list[dict[str, float]]:
        """All optimizer steps of a rollout batch. Returns one dictionary of metrics a step, the same on every rank."""
        self.times, self.trained_log_probs = {}, {}
        if getattr(self.args, "reset_optimizer_states", False):
            self.reset_optimizer()
        with self._timed("data_preprocess"):
            check_columns(shard.columns)
        copies.before_rollout()
        plan = self._plan(shard)
        self._score(shard, plan, score)
        with self._timed("data_preprocess"):
            self._advantages(shard)
            if self.postprocess is not None:
                self.postprocess(self.args, shard.rollout_id, shard.columns)
        with self._timed("actor_train"):
            steps = [self._step(shard, i, step, plan.old_is_current) for i, step in enumerate(shard.steps)]
        copies.after_rollout(shard.rollout_id)
        if plan.old_is_current:
            shard.columns["log_probs"] = [self.trained_log_probs[i] for i in range(len(shard.columns["tokens"]))]
        self._save_debug_data(shard)
        batch_metrics = rollout_data_metrics(self.args, shard)
        self._add_times(shard, batch_metrics)
        steps[-1] |= batch_metrics.reduce(self.gather)
        return steps

    def _plan(self, shard: TrainShard) -> ScoringPlan:
        plan = plan_scoring(self.args, shard, deterministic_forward=not self.has_dropout())
        # A hook that looks at the batch wants its log-probs; entropy before training needs a pass of its own.
        observed = self.postprocess is not None or getattr(self.args, "use_rollout_entropy", False)
        if plan.old_is_current and observed:
            return ScoringPlan(policy=True, reference=plan.reference, old_is_current=False)
        return plan

    def _score(self, shard: TrainShard, plan: ScoringPlan, score: Score) -> None:
        columns = shard.columns
        if plan.reference:
            with self._timed("ref_log_probs"):
                columns["ref_log_probs"] = score(shard, "ref", with_entropy=False)[0]
        if plan.values:
            with self._timed("values"):
                columns["values"] = score(shard, "critic", with_entropy=False)[0]
        if plan.policy:
            tag = "old_actor" if getattr(self.args, "keep_old_actor", False) else "actor"
            entropy = bool(getattr(self.args, "use_rollout_entropy", False))
            with self._timed("log_probs"):
                columns["log_probs"], entropies = score(shard, tag, with_entropy=entropy)
            if entropy:
                columns["entropy"] = entropies

    def _advantages(self, shard: TrainShard) -> None:
        args, columns = self.args, shard.columns
        wanted = getattr(args, "compute_advantages_and_returns", True) and "rewards" in columns
        if getattr(args, "loss_type", "policy_loss") == "sft_loss" or not wanted:
            return

        def all_reduce_sum(tensor: Tensor) -> Tensor:
            return self.gather(tensor.reshape(-1)).sum(0).reshape(tensor.shape)

        compute_advantages(
            args, columns, columns.get("log_probs"), columns.get("ref_log_probs"), all_reduce_sum
        ).write_to(columns)

    def _save_debug_data(self, shard: TrainShard) -> None:
        template = getattr(self.args, "save_debug_train_data", None)
        if not template:
            return
        rank = dist.get_rank()
        path = Path(template.format(rollout_id=shard.rollout_id, rank=rank))
        if "{rank}" not in template:
            path = path.with_name(f"{path.stem}_rank{rank}{path.suffix}")
        path.parent.mkdir(parents=True, exist_ok=True)
        steps = [step.micro_batches for step in shard.steps]
        torch.save({"rollout_id": shard.rollout_id, "rank": rank, "steps": steps, "columns": shard.columns}, path)

    def _step(self, shard: TrainShard, index: int, step: StepPlan, old_is_current: bool) -> dict[str, float]:
        self.before_step(shard.rollout_id, index)
        self.correction_sums = self._correction_sums(shard, step)
        metrics = self.accumulate_gradients(shard, step, old_is_current=old_is_current)
        grad_norm = self.clip_gradients()
        values = self.reduce(metrics)
        values |= self.schedule.metrics() | {"train/grad_norm": grad_norm}

        def suspects() -> list[str]:
            indices = [i for micro_batch in step.micro_batches for i in micro_batch]
            local = nonfinite_samples(shard.columns, indices, self.trained_log_probs)
            return sorted({name for rank in gather_objects(local) for name in rank})

        finite = check_step_is_finite(
            self.args, values, grad_norm, rollout_id=shard.rollout_id, step=index, suspects=suspects
        )
        if finite:
            self.take_step()
            self.schedule.step()
        self.drop_gradients()
        return values

    def _correction_sums(self, shard: TrainShard, step: StepPlan) -> Tensor | None:
        """What the correction adds up over the whole step, all ranks; None where it adds up nothing."""
        if not needs_step_sums(self.args):
            return None
        indices = [i for micro_batch in step.micro_batches for i in micro_batch]
        batch = MicroBatch.from_columns(self.args, shard.columns, indices)
        local = local_step_sums(self.args, batch.get("log_probs"), batch.get("rollout_log_probs"), batch.loss_masks)
        return None if local is None else self.gather(local.to(self.device)).sum(0)

    # ---- the objective of one micro-batch ------------------------------------------------------------------------

    def objective(
        self,
        batch: MicroBatch,
        indices: Sequence[int],
        step: StepPlan,
        log_probs: Tensor,
        entropy: Tensor | None,
        *,
        old_is_current: bool,
    ) -> Objective:
        """The loss of samples `indices` from their log-probs `[R]`, for every loss that needs nothing else."""
        totals = StepTotals(step.num_rollouts, step.num_tokens, self.correction_sums)
        if getattr(self.args, "loss_type", "policy_loss") == "sft_loss":
            return sft_objective(self.args, batch, log_probs, totals)
        if old_is_current:
            values = log_probs.detach().cpu().split(batch.response_lengths)
            self.trained_log_probs.update(zip(indices, values, strict=True))
        return policy_objective(self.args, batch, log_probs, entropy, totals, old_is_current=old_is_current)

    # ---- times ---------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def _timed(self, name: str) -> Iterator[None]:
        started = time.perf_counter()
        try:
            yield
        finally:
            if self.device.type == "cuda":
                torch.cuda.synchronize()
            self.times[name] = self.times.get(name, 0.0) + time.perf_counter() - started

    def _add_times(self, shard: TrainShard, metrics: StepMetrics) -> None:
        """Times are the slowest rank's; the token rate counts all ranks' tokens, FLOP/s are the mean of ranks."""
        for name, seconds in self.times.items():
            metrics.add_max(f"perf/{name}_time", seconds)
        if self.device.type == "cuda":
            metrics.add_max("perf/trainer_peak_memory_gib", torch.cuda.max_memory_allocated() / 2**30)
            torch.cuda.reset_peak_memory_stats()
        totals = [int(n) for n in shard.columns["total_lengths"]]
        # Ranks train in step, so each one's share of the time is the same: rates add up.
        metrics.add("perf/actor_train_tok_per_s", sum(totals) / max(self.times["actor_train"], 1e-9))
        if self.dims is not None:
            flops = batch_flops(self.dims, totals, [int(n) for n in shard.columns["response_lengths"]])
            for name, value in throughput_metrics(flops, self.times, self.peak_tflops).items():
                metrics.add_ratio(name, value, 1)


def model_dims(directory: str | Path) -> ModelDims | None:
    """Sizes for FLOP counts; None for architectures whose config has other names for them."""
    try:
        return ModelDims.from_hf_directory(directory)
    except ValueError:
        return None


def all_gather_vector(vector: Tensor, group: Any = None) -> Tensor:
    """`[n]` of every rank of the group as `[ranks, n]`."""
    parts = [torch.empty_like(vector) for _ in range(dist.get_world_size(group))]
    dist.all_gather(parts, vector.contiguous(), group=group)
    return torch.stack(parts)
