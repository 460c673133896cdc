"""Optimizer steps of a model spread by megatron-core."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.tensor_parallel import gather_from_tensor_model_parallel_region
from megatron.core.utils import get_model_config
from torch import Tensor

from miles.backends.megatron_utils import optimizer as optimizers
from miles.backends.megatron_utils.forward import Pipeline
from miles.backends.megatron_utils.layout import Layout
from miles.backends.megatron_utils.micro_batch import ModelInput
from miles.backends.training_utils.backend import StepPlan, TrainShard
from miles.backends.training_utils.batch_runner import BatchRunner, all_gather_vector
from miles.backends.training_utils.columns import MicroBatch
from miles.backends.training_utils.loss_hub.base import Objective
from miles.backends.training_utils.loss_hub.custom_loss import custom_objective
from miles.backends.training_utils.loss_hub.reducers import StepTotals
from miles.backends.training_utils.lr_schedule import LRSchedule
from miles.backends.training_utils.metrics import StepMetrics
from miles.backends.training_utils.objective import needs_entropy
from miles.utils.imports import load_function


class MegatronStepRunner(BatchRunner):
    """Loss contributions are summed, not averaged: over micro-batches, data- and context-parallel ranks."""

    def __init__(
        self, args: Any, pipeline: Pipeline, optimizer: Any, schedule: LRSchedule, layout: Layout, device: torch.device
    ) -> None:
        super().__init__(args, schedule, device)
        self.pipeline, self.optimizer, self.layout = pipeline, optimizer, layout
        self.config = get_model_config(pipeline.chunks[0])
        self.before_step_hook = load_function(getattr(args, "custom_megatron_before_train_step_hook_path", None))
        self._overflow = False

    def before_step(self, rollout_id: int, step: int) -> None:
        if self.before_step_hook is not None:
            self.before_step_hook(self.args, rollout_id, step, self.pipeline.chunks, self.optimizer, self.schedule)

    # ---- gradients -----------------------------------------------------------------------------------------------

    def accumulate_gradients(self, shard: TrainShard, step: StepPlan, *, old_is_current: bool) -> StepMetrics:
        """Leaves the step's gradient in DDP's buffers, summed over ranks (with a distributed optimizer: its shard)."""
        metrics = StepMetrics()
        self.drop_gradients()
        balancing = self._scale_losses(shard, step)
        custom = getattr(self.args, "loss_type", "policy_loss") == "custom_loss"
        entropy, _ = needs_entropy(self.args)

        def on_logits(number: int, batch: ModelInput, logits: Tensor) -> tuple[Tensor, None]:
            indices = step.micro_batches[number]
            columns = MicroBatch.from_columns(self.args, shard.columns, indices, self.device)
            if custom:
                objective = self._custom(columns, logits, step)
            else:
                values = self.pipeline.log_probs(batch, logits, with_entropy=entropy)
                objective = self.objective(columns, indices, step, *values, old_is_current=old_is_current)
            metrics.merge(objective.metrics)
            return objective.loss * balancing, None

        for chunk in self.pipeline.chunks:
            chunk.train()
        self.pipeline.run(shard.columns, step.micro_batches, on_logits, forward_only=False, all_rows=custom)
        if old_is_current:
            self.trained_log_probs = from_last_stage(self.trained_log_probs)
        return metrics

    def _scale_losses(self, shard: TrainShard, step: StepPlan) -> float:
        """Set what gradients are scaled by, and return what the loss is multiplied by to make up for it.

        megatron-core adds the balancing losses of experts weighted by their tokens, for a division by all tokens of the
        step at its end. This trainer's loss is normalised already, so that division is made here, for both.
        """
        tokens = 1.0
        if _balances_experts(self.config):
            local = self.pipeline.num_tokens(shard.columns, step.micro_batches)
            tokens = float(self.gather(torch.tensor([local], dtype=torch.float64)).sum())
        scale = self.loss_scale / tokens
        self.config.grad_scale_func = (lambda loss: loss * scale) if scale != 1.0 else None
        return tokens

    def _custom(self, columns: MicroBatch, logits: Tensor, step: StepPlan) -> Objective:
        """`--custom-loss-function-path` gets the logits of the whole vocabulary, at every token."""
        if self.layout.cp_size > 1:
            raise ValueError("--loss-type custom_loss wants whole sequences: set --context-parallel-size 1")
        whole = gather_from_tensor_model_parallel_region(logits)[..., : self.pipeline.vocab]
        return custom_objective(self.args, columns, whole, StepTotals(step.num_rollouts, step.num_tokens))

    def clip_gradients(self) -> float:
        self._overflow = bool(self.optimizer.prepare_grads())
        if self._overflow:
            return math.inf
        norm = float(self.optimizer.get_grad_norm() or 0.0)
        if math.isfinite(norm):
            optimizers.clip(self.optimizer, norm, float(getattr(self.args, "clip_grad", 1.0)))
        return norm

    def take_step(self) -> None:
        self.optimizer.step_with_ready_grads()

    def drop_gradients(self) -> None:
        for chunk in self.pipeline.chunks:
            chunk.zero_grad_buffer()
        self.optimizer.zero_grad()

    def reset_optimizer(self) -> None:
        optimizers.reset_moments(self.optimizer)

    def has_dropout(self) -> bool:
        return bool(self.config.attention_dropout or self.config.hidden_dropout or self.config.moe_input_jitter_eps)

    # ---- ranks ---------------------------------------------------------------------------------------------------

    def gather(self, vector: Tensor) -> Tensor:
        return all_gather_vector(vector, parallel_state.get_data_parallel_group())

    def reduce(self, metrics: StepMetrics) -> dict[str, float]:
        """Only the last stage has a loss; everyone gets what its first rank computed."""
        values = metrics.reduce(self.gather) if self.layout.is_last_stage else {}
        box = [values]
        dist.broadcast_object_list(box, src=_first_with_metrics(self.layout))
        return box[0]


def from_last_stage(value: Any) -> Any:
    """A host object of the last pipeline stage, on every stage. Collective."""
    if parallel_state.get_pipeline_model_parallel_world_size() == 1:
        return value
    box = [value]
    group = parallel_state.get_pipeline_model_parallel_group()
    dist.broadcast_object_list(box, src=parallel_state.get_pipeline_model_parallel_last_rank(), group=group)
    return box[0]


def _first_with_metrics(layout: Layout) -> int:
    """Global rank of the first rank of the last stage: pipeline stages are the outermost division of ranks."""
    return dist.get_world_size() // layout.pp_size * (layout.pp_size - 1)


def _balances_experts(config: Any) -> bool:
    if not config.num_moe_experts:
        return False
    coefficients = config.moe_aux_loss_coeff
    weights = coefficients if isinstance(coefficients, (list, tuple)) else [coefficients]
    balanced = config.moe_router_load_balancing_type not in ("none", ["none"]) and any(weights)
    return bool(balanced or config.moe_z_loss_coeff)
