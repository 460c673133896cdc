"""A rollout batch becomes optimizer steps: score, advantages, then forward, backward and step."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from miles.backends.fsdp_utils.loading import LoadedPolicy, fsdp_modules, reshard
from miles.backends.fsdp_utils.optimizer import clip_gradients
from miles.backends.fsdp_utils.scorer import logits_of_micro_batch, score_micro_batch
from miles.backends.fsdp_utils.weight_tags import WeightCopies
from miles.backends.training_utils.advantages import compute_advantages
from miles.backends.training_utils.backend import StepPlan, TrainShard
from miles.backends.training_utils.batching.flops import ModelDims
from miles.backends.training_utils.columns import MicroBatch, check_columns
from miles.backends.training_utils.finite import check_step_is_finite
from miles.backends.training_utils.loss_hub.reducers import StepTotals
from miles.backends.training_utils.lr_schedule import LRSchedule
from miles.backends.training_utils.metrics import StepMetrics
from miles.backends.training_utils.objective import (
    Objective,
    custom_objective,
    needs_entropy,
    policy_objective,
    sft_objective,
)
from miles.backends.training_utils.rollout_metrics import rollout_data_metrics
from miles.backends.training_utils.scoring import ScoringPlan, plan_scoring
from miles.backends.training_utils.throughput import batch_flops, peak_tflops, throughput_metrics
from miles.utils.imports import load_function

# (shard, tag, with_entropy=...) -> log-probs and entropies, one tensor a sample.
Score = Callable[..., tuple[list[torch.Tensor], list[torch.Tensor]]]


class StepRunner:
    """Trains one model on rollout batches; every method is collective."""

    def __init__(
        self,
        args: Any,
        actor: LoadedPolicy,
        optimizer: torch.optim.Optimizer,
        schedule: LRSchedule,
        mesh: DeviceMesh,
        device: torch.device,
    ) -> None:
        self.args, self.actor, self.optimizer, self.schedule, self.device = args, actor, optimizer, schedule, device
        self.params = [p for group in optimizer.param_groups for p in group["params"]]
        self.shard_group = mesh.get_group("dp")
        self.postprocess = load_function(getattr(args, "rollout_data_postprocess_path", None))
        self.dims = model_dims(args.hf_checkpoint)
        name = torch.cuda.get_device_name(device) if device.type == "cuda" else None
        self.peak_tflops = peak_tflops(args, name)
        self.times: dict[str, float] = {}
        self.trained_log_probs: dict[int, torch.Tensor] = {}  # of the training pass, where they are the old ones too
        # fp16 gradients of small losses underflow: they are computed from a larger loss, and divided again.
        self.loss_scale = 4096.0 if getattr(args, "fp16", False) else 1.0

    def run(self, shard: TrainShard, score: Score, copies: WeightCopies) -> list[dict[str, float]]:
        """All optimizer steps of a rollout batch. Returns one dictionary of metrics a step, the same on every rank."""
        self.times, self.trained_log_probs = {}, {}
        if getattr(self.args, "reset_optimizer_states", False):
            self.optimizer.state.clear()
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
        steps[-1] |= batch_metrics.reduce(all_gather_vector)
        return steps

    # ---- before the first step -----------------------------------------------------------------------------------

    def _plan(self, shard: TrainShard) -> ScoringPlan:
        plan = plan_scoring(self.args, shard, deterministic_forward=not has_dropout(self.actor))
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

    # ---- one optimizer step --------------------------------------------------------------------------------------

    def _step(self, shard: TrainShard, index: int, step: StepPlan, old_is_current: bool) -> dict[str, float]:
        metrics = self.accumulate_gradients(shard, step, old_is_current=old_is_current)
        grad_norm = clip_gradients(self.params, float(getattr(self.args, "clip_grad", 1.0)), self.shard_group)
        values = metrics.reduce(all_gather_vector)
        values |= self.schedule.metrics() | {"train/grad_norm": grad_norm}
        if check_step_is_finite(self.args, values, grad_norm, rollout_id=shard.rollout_id, step=index):
            self.optimizer.step()
            self.schedule.step()
        self.optimizer.zero_grad(set_to_none=True)
        return values

    def accumulate_gradients(self, shard: TrainShard, step: StepPlan, *, old_is_current: bool) -> StepMetrics:
        """Forward and backward over a step's micro-batches.

        Leaves in each parameter's `grad` this rank's shard of the step's whole gradient, summed over ranks. Returns the
        rank's contributions to the metrics.
        """
        metrics = StepMetrics()
        self.optimizer.zero_grad(set_to_none=True)
        self.actor.module.train()
        for i, indices in enumerate(step.micro_batches):
            self._sync_gradients(last=i == len(step.micro_batches) - 1)
            objective = self._objective(shard, indices, step, old_is_current)
            (objective.loss * self.loss_scale).backward()
            metrics.merge(objective.metrics)
        reshard(self.actor.module)
        if self.loss_scale != 1.0:
            torch._foreach_mul_([p.grad for p in self.params if p.grad is not None], 1.0 / self.loss_scale)
        return metrics

    def _objective(self, shard: TrainShard, indices: list[int], step: StepPlan, old_is_current: bool) -> Objective:
        args, kind = self.args, getattr(self.args, "loss_type", "policy_loss")
        batch = MicroBatch.from_columns(args, shard.columns, indices, self.device)
        totals = StepTotals(step.num_rollouts, step.num_tokens)
        if kind == "custom_loss":
            logits = logits_of_micro_batch(self.actor, shard.columns, indices, self.device)
            return custom_objective(args, batch, logits, totals)
        entropy, _ = needs_entropy(args)
        scores = score_micro_batch(args, self.actor, shard.columns, indices, self.device, with_entropy=entropy)
        if kind == "sft_loss":
            return sft_objective(args, batch, scores.log_probs, totals)
        if old_is_current:
            values = scores.log_probs.detach().cpu().split(batch.response_lengths)
            self.trained_log_probs.update(zip(indices, values, strict=True))
        return policy_objective(args, batch, scores.log_probs, scores.entropy, totals, old_is_current=old_is_current)

    def _sync_gradients(self, *, last: bool) -> None:
        """Reduce gradients once, after the last micro-batch; a model that fits keeps its gathered parameters till then."""
        for module in fsdp_modules(self.actor.module):
            module.set_requires_gradient_sync(last)
            if self.actor.stays_gathered:
                module.set_reshard_after_backward(last)

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


def has_dropout(loaded: LoadedPolicy) -> bool:
    """Whether two training passes of the same weights differ."""
    config = loaded.config
    if any(getattr(config, name, 0.0) for name in ("attention_dropout", "hidden_dropout", "resid_pdrop", "attn_pdrop")):
        return True
    return any(isinstance(m, nn.Dropout) and m.p > 0 for m in loaded.module.modules())


def all_reduce_sum(tensor: torch.Tensor) -> torch.Tensor:
    """Sum over ranks, in rank order."""
    return all_gather_vector(tensor.reshape(-1)).sum(0).reshape(tensor.shape)


def all_gather_vector(vector: torch.Tensor) -> torch.Tensor:
    """`[n]` of every rank as `[world, n]`."""
    parts = [torch.empty_like(vector) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, vector.contiguous())
    return torch.stack(parts)
