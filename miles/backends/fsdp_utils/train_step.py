"""Optimizer steps of a model sharded by FSDP2."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from miles.backends.fsdp_utils.loading import LoadedPolicy, fsdp_modules, reshard
from miles.backends.fsdp_utils.optimizer import clip_gradients
from miles.backends.fsdp_utils.scorer import logits_of_micro_batch, score_micro_batch, values_of_micro_batch
from miles.backends.training_utils.backend import StepPlan, TrainShard
from miles.backends.training_utils.batch_runner import BatchRunner
from miles.backends.training_utils.columns import MicroBatch
from miles.backends.training_utils.loss_hub.base import Objective
from miles.backends.training_utils.loss_hub.custom_loss import custom_objective
from miles.backends.training_utils.loss_hub.reducers import StepTotals
from miles.backends.training_utils.loss_hub.value_loss import value_objective
from miles.backends.training_utils.lr_schedule import LRSchedule
from miles.backends.training_utils.metrics import StepMetrics
from miles.backends.training_utils.objective import needs_entropy


class StepRunner(BatchRunner):
    """Every rank holds a shard of each parameter and trains on its own samples."""

    def __init__(
        self,
        args: Any,
        actor: LoadedPolicy,
        optimizer: torch.optim.Optimizer,
        schedule: LRSchedule,
        mesh: DeviceMesh,
        device: torch.device,
    ) -> None:
        super().__init__(args, schedule, device)
        self.actor, self.optimizer = actor, optimizer
        self.params = [p for group in optimizer.param_groups for p in group["params"]]
        self.shard_group = mesh.get_group("dp")

    def accumulate_gradients(self, shard: TrainShard, step: StepPlan, *, old_is_current: bool) -> StepMetrics:
        """Leaves in each parameter's `grad` this rank's shard of the step's whole gradient, summed over ranks."""
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
        args = self.args
        batch = MicroBatch.from_columns(args, shard.columns, indices, self.device)
        if getattr(args, "loss_type", "policy_loss") == "custom_loss":
            logits = logits_of_micro_batch(self.actor, shard.columns, indices, self.device)
            return custom_objective(args, batch, logits, StepTotals(step.num_rollouts, step.num_tokens))
        if args.loss_type == "value_loss":
            values = values_of_micro_batch(self.actor, shard.columns, indices, self.device)
            return value_objective(args, batch, values, StepTotals(step.num_rollouts, step.num_tokens))
        entropy, _ = needs_entropy(args)
        scores = score_micro_batch(args, self.actor, shard.columns, indices, self.device, with_entropy=entropy)
        return self.objective(batch, indices, step, scores.log_probs, scores.entropy, old_is_current=old_is_current)

    def _sync_gradients(self, *, last: bool) -> None:
        """Reduce gradients once, after the last micro-batch; a model that fits keeps its gathered parameters till then."""
        for module in fsdp_modules(self.actor.module):
            module.set_requires_gradient_sync(last)
            if self.actor.stays_gathered:
                module.set_reshard_after_backward(last)

    def clip_gradients(self) -> float:
        return clip_gradients(self.params, float(getattr(self.args, "clip_grad", 1.0)), self.shard_group)

    def take_step(self) -> None:
        self.optimizer.step()

    def drop_gradients(self) -> None:
        self.optimizer.zero_grad(set_to_none=True)

    def reset_optimizer(self) -> None:
        self.optimizer.state.clear()

    def has_dropout(self) -> bool:
        config = self.actor.config
        if any(
            getattr(config, name, 0.0) for name in ("attention_dropout", "hidden_dropout", "resid_pdrop", "attn_pdrop")
        ):
            return True
        return any(isinstance(m, nn.Dropout) and m.p > 0 for m in self.actor.module.modules())
