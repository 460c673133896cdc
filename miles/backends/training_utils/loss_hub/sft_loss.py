"""Supervised fine-tuning: the negative log-likelihood of the tokens that train."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from miles.backends.training_utils.columns import MicroBatch
from miles.backends.training_utils.loss_hub.base import Objective
from miles.backends.training_utils.loss_hub.reducers import StepTotals
from miles.backends.training_utils.metrics import StepMetrics


def sft_objective(args: Any, batch: MicroBatch, log_probs: Tensor, totals: StepTotals) -> Objective:
    """-log p of each trainable token, reduced as every loss is; `log_probs` flat `[R]` at temperature 1."""
    metrics = StepMetrics()
    loss = batch.reducer(-log_probs) / totals.normalizer(args)
    metrics.add("train/loss", loss)
    bad = (batch.mask > 0) & ~torch.isfinite(log_probs.detach())
    metrics.add("train/nonfinite_tokens", bad.sum())
    return Objective(loss, metrics)
