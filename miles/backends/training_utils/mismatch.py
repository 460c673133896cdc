"""Evidence that trainer and engine describe the same policy: measured on every step, whatever the loss uses."""

from __future__ import annotations

import torch
from torch import Tensor

from miles.backends.training_utils.columns import MicroBatch
from miles.backends.training_utils.loss_hub.kl import compute_approx_kl
from miles.backends.training_utils.loss_hub.policy_loss import ratio_of
from miles.backends.training_utils.metrics import StepMetrics


def add_mismatch_metrics(batch: MicroBatch, trainer: Tensor | None, metrics: StepMetrics, norm: float) -> None:
    """Compare the trainer's own score of the sampled tokens, `[R]`, with the engine's.

    Adds the mean and the largest |difference|, the KL estimate, the share of tokens that agree bit for bit, and the
    distribution of the ratio that corrections cut.
    """
    rollout = batch.flat("rollout_log_probs")
    if rollout is None or trainer is None:
        return
    trains = batch.mask > 0
    diff = torch.where(trains, (trainer - rollout).abs(), 0.0)
    metrics.add("train/train_rollout_logprob_abs_diff", batch.reducer(diff) / norm)
    metrics.add_max("train/train_rollout_logprob_abs_diff_max", diff.max() if diff.numel() else 0.0)
    metrics.add("train/train_rollout_kl", batch.reducer(compute_approx_kl(rollout, trainer, "low_var_kl")) / norm)
    exact = (trains & (trainer == rollout)).sum()
    metrics.add_ratio("contract/logprob_exact_ratio", exact, trains.sum())
    _add_ratio_distribution((trainer - rollout)[trains], metrics)


def _add_ratio_distribution(log_ratio: Tensor, metrics: StepMetrics) -> None:
    """How m = p_trainer / p_engine of the trained tokens is spread, before anything cuts it; log m is `[n]`.

    Source: Miles v0.1 article, section 4.2: look at the distribution before choosing what to do about its tails.
    """
    log_ratio = log_ratio.detach()
    log_ratio = log_ratio[torch.isfinite(log_ratio)]
    ratio = ratio_of(log_ratio)
    metrics.add_quantiles("train/mismatch_ratio", log_ratio)
    metrics.add_max("train/mismatch_ratio/max", ratio.max() if ratio.numel() else 0.0)
    metrics.add_ratio("train/mismatch_ratio/mean", ratio.double().sum(), ratio.numel())
    metrics.add_ratio("train/mismatch_ratio/abs", (ratio - 1).abs().double().sum(), ratio.numel())
    metrics.add_ess("train/mismatch_ratio/ess", ratio)


def add_contract_metrics(batch: MicroBatch, metrics: StepMetrics) -> None:
    """How much of the batch the token and version contracts cover; samples that break the first were refused before."""
    samples = sum(not filler for filler in batch.fillers)
    metrics.add_ratio("contract/token_exact_ratio", samples, samples)
    metrics.add_ratio("contract/version_coverage", batch.num_spanned, batch.mask.sum())
