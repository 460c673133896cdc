"""A loss of the user's own, from the model's logits (`--custom-loss-function-path`)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from miles.backends.training_utils.columns import MicroBatch
from miles.backends.training_utils.loss_hub.base import Objective
from miles.backends.training_utils.loss_hub.reducers import StepTotals
from miles.backends.training_utils.metrics import StepMetrics
from miles.backends.training_utils.mismatch import add_contract_metrics, add_mismatch_metrics
from miles.utils.imports import load_function


def custom_objective(args: Any, batch: MicroBatch, logits: Tensor, totals: StepTotals) -> Objective:
    """`f(args, batch, logits, sum_of_sample_mean) -> (loss, metrics)`.

    The function gets the micro-batch's columns as a dict of lists, the model's logits (`[1, T, V]` or `[B, S, V]`,
    not tempered) and the reducer; what it returns, loss and metric values alike, are sums over samples (or tokens), and
    are divided by the step's normaliser here. The gap to the engine's log-probs is measured whatever it computes.
    """
    function = load_function(args.custom_loss_function_path)
    if function is None:
        raise ValueError("--loss-type custom_loss needs --custom-loss-function-path")
    columns = dict(batch.columns)
    columns.update(
        unconcat_tokens=[torch.as_tensor(t, dtype=torch.int64, device=logits.device) for t in batch.columns["tokens"]],
        loss_masks=batch.loss_masks,
        response_lengths=batch.response_lengths,
        total_lengths=batch.total_lengths,
        rollout_mask_sums=batch.rollout_mask_sums,
    )
    loss, values = function(args, columns, logits, batch.reducer)
    norm = totals.normalizer(args)
    metrics = StepMetrics()
    metrics.add("train/loss", loss / norm)
    for name, value in values.items():
        if name != "loss":
            metrics.add(f"train/{name}", torch.as_tensor(value) / norm)
    add_mismatch_metrics(batch, batch.flat("log_probs"), metrics, norm)
    add_contract_metrics(batch, metrics)
    return Objective(loss / norm, metrics)
