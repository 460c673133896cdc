"""The objective of one micro-batch: its share of the optimizer step's loss, and of the step's metrics.

**Contract.** The loss returned is a *contribution*: the step's loss is the sum over all micro-batches of all ranks,
nothing more is divided. So a backend runs `backward` on each and *sums* gradients over data-parallel ranks; one whose
collective averages multiplies by the number of ranks. Gradients are then the same, to rounding, for any split.

A context-parallel backend gathers log-probs to whole responses first, with a gather whose backward keeps each rank's
own slice and sums nothing; the objective then sees the same on each of its ranks, and only one adds the metrics.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from miles.backends.training_utils.columns import MicroBatch
from miles.backends.training_utils.loss_hub.base import Objective
from miles.backends.training_utils.loss_hub.corrections import HookParallelState, correction_of
from miles.backends.training_utils.loss_hub.kl import compute_approx_kl, importance_ratio
from miles.backends.training_utils.loss_hub.opsm import opsm_keep
from miles.backends.training_utils.loss_hub.policy_loss import ratio_of
from miles.backends.training_utils.loss_hub.reducers import StepTotals, pg_loss_reducer
from miles.backends.training_utils.loss_hub.registry import get_estimator
from miles.backends.training_utils.metrics import StepMetrics
from miles.backends.training_utils.mismatch import add_contract_metrics, add_mismatch_metrics


def needs_entropy(args: Any) -> tuple[bool, bool]:
    """Whether the objective wants entropy, and whether with gradient."""
    if getattr(args, "loss_type", "policy_loss") != "policy_loss":
        return False, False
    trained = bool(getattr(args, "entropy_coef", 0.0))
    return trained or bool(getattr(args, "observe_training_entropy", False)), trained


def policy_objective(
    args: Any,
    batch: MicroBatch,
    log_probs: Tensor,
    entropy: Tensor | None,
    totals: StepTotals,
    *,
    old_is_current: bool = False,
) -> Objective:
    """The policy loss: clipped surrogate, OPSM, mismatch correction, reduction, entropy bonus, KL to the reference.

    Args:
        log_probs: of the response tokens under the current weights, flat fp32 `[R]`, with gradient.
        entropy: of the distributions they were sampled from, `[R]`; needed with `--entropy-coef`.
        totals: of the whole optimizer step.
        old_is_current: the weights are still those that the batch starts from (a single optimizer step a rollout), so
            that the current log-probs, detached, are the old ones. `--skip-actor-forward-only` implies it.
    Raises: ValueError where the loss needs log-probs that nobody scored.
    """
    estimator = get_estimator(args.advantage_estimator)
    metrics = StepMetrics()
    norm = totals.normalizer(args)
    inputs = _policy_inputs(args, batch, log_probs, old_is_current)
    token = estimator.token_loss(args, inputs.log_ratio, inputs.advantages, inputs.log_probs)
    loss_tokens = _mask_drifted(args, batch, token.loss, inputs, metrics, norm)
    loss_tokens, masks = _correct(args, batch, loss_tokens, inputs, metrics, totals)
    reduce = pg_loss_reducer(args, batch.total_lengths, batch.response_lengths, masks, batch.rollout_mask_sums)
    pg_loss = reduce(loss_tokens) / norm
    loss = pg_loss + _entropy_term(args, batch, entropy, metrics, norm)
    loss = loss + _kl_term(args, batch, inputs, metrics, norm)

    metrics.add("train/loss", loss)
    metrics.add("train/pg_loss", pg_loss)
    metrics.add("train/pg_clipfrac", batch.reducer(token.clipped) / norm)
    metrics.add("train/ppo_kl", batch.reducer(-inputs.log_ratio.detach()) / norm)
    metrics.add("train/nonfinite_tokens", ((batch.mask > 0) & ~inputs.valid).sum())
    _add_ess(batch, metrics, inputs)
    distilled = batch.flat("opd_reverse_kl")
    if distilled is not None:
        metrics.add("train/opd_reverse_kl", batch.reducer(distilled) / norm)
    add_mismatch_metrics(batch, inputs.trainer, metrics, norm)
    add_contract_metrics(batch, metrics)
    return Objective(loss, metrics)


def _flag(args: Any, name: str) -> bool:
    return bool(getattr(args, name, False))


@dataclass(frozen=True)
class _PolicyInputs:
    """What the policy loss is made of, `[R]` each; 0 wherever `valid` is False, so that nothing there counts.

    `trainer`: the trainer's own score before the first update, as it is. `old`: where the ratio starts from.
    `log_ratio`: log p - log p_old of each token, or of its whole response where the estimator says so.
    `sequence_log_ratio`: the mean over the response, for estimators and masks that look at whole responses.
    """

    valid: Tensor
    trainer: Tensor | None
    log_probs: Tensor
    old: Tensor
    advantages: Tensor
    log_ratio: Tensor
    sequence_log_ratio: Tensor | None


def _policy_inputs(args: Any, batch: MicroBatch, log_probs: Tensor, old_is_current: bool) -> _PolicyInputs:
    current, advantages = log_probs.detach(), batch.flat("advantages")
    if advantages is None:
        raise ValueError("the batch has no advantages: run compute_advantages before the policy loss")
    trainer = batch.flat("log_probs")
    if trainer is None and (old_is_current or _flag(args, "skip_actor_forward_only")):
        trainer = current
    old = trainer
    if _flag(args, "use_rollout_logprobs"):
        old = batch.flat("rollout_log_probs")
        if old is None:
            raise ValueError("--use-rollout-logprobs: the batch has no rollout_log_probs from the engine")
    if old is None:
        raise ValueError(
            "the policy loss needs old log-probs (column log_probs): score the batch before training on it"
        )
    finite = torch.isfinite(current) & torch.isfinite(old) & torch.isfinite(advantages)
    valid = (batch.mask > 0) & finite
    # where, not a product: 0 x NaN is NaN, forward and backward.
    log_ratio = torch.where(valid, log_probs - old, 0.0)
    sequence_ratio = get_estimator(args.advantage_estimator).sequence_ratio
    sequence_log_ratio = None
    if sequence_ratio or _flag(args, "use_opsm"):
        sequence_log_ratio = torch.where(valid, _sequence_mean(batch, log_ratio), 0.0)
    return _PolicyInputs(
        valid=valid,
        trainer=trainer,
        log_probs=torch.where(valid, log_probs, 0.0),
        old=torch.where(valid, old, 0.0),
        advantages=torch.where(valid, advantages, 0.0),
        log_ratio=sequence_log_ratio if sequence_ratio and sequence_log_ratio is not None else log_ratio,
        sequence_log_ratio=sequence_log_ratio,
    )


def _mask_drifted(
    args: Any, batch: MicroBatch, loss_tokens: Tensor, inputs: _PolicyInputs, metrics: StepMetrics, norm: float
) -> Tensor:
    """OPSM, with `--use-opsm`."""
    if not _flag(args, "use_opsm") or inputs.sequence_log_ratio is None:
        return loss_tokens
    keep = opsm_keep(inputs.advantages, inputs.sequence_log_ratio.detach(), args.opsm_delta)
    metrics.add("train/opsm_clipfrac", batch.reducer(1 - keep) / norm)
    return loss_tokens * keep


def _sequence_mean(batch: MicroBatch, x: Tensor) -> Tensor:
    """Mean of `[R]` over each sample's trainable tokens, repeated over the response; x is 0 where masked."""
    counts = batch.per_sample(batch.mask).clamp(min=1.0)
    return batch.broadcast(batch.per_sample(x) / counts)


def _correct(
    args: Any,
    batch: MicroBatch,
    loss_tokens: Tensor,
    inputs: _PolicyInputs,
    metrics: StepMetrics,
    totals: StepTotals,
) -> tuple[Tensor, list[Tensor]]:
    """Apply TIS, clip-or-pop or a custom hook; with `--get-mismatch-metrics` alone, only look."""
    function = correction_of(args)
    if function is None:
        return loss_tokens, batch.loss_masks
    rollout, norm = batch.flat("rollout_log_probs"), totals.normalizer(args)

    def lists(flat: Tensor | None) -> list[Tensor] | None:
        return None if flat is None else batch.split(torch.where(inputs.valid, flat, 0.0))

    corrected, masks, values = function(
        args=args,
        pg_loss=loss_tokens,
        train_log_probs=lists(inputs.trainer),
        rollout_log_probs=lists(rollout),
        loss_masks=batch.loss_masks,
        total_lengths=batch.total_lengths,
        response_lengths=batch.response_lengths,
        parallel_state=HookParallelState(),
        max_seq_lens=None,
        **({} if totals.correction is None else {"step_sums": totals.correction}),
    )
    metrics.add("train/ois", batch.reducer(ratio_of(inputs.log_ratio.detach())) / norm)
    for name, value in values.items():
        metrics.add(f"train/{name}", batch.reducer(value.detach()) / norm)
    _check_masks(args, batch, masks)
    return (corrected, list(masks)) if _flag(args, "use_tis") else (loss_tokens, batch.loss_masks)


def _check_masks(args: Any, batch: MicroBatch, masks: Sequence[Tensor]) -> None:
    lengths = [len(m) for m in masks]
    if lengths != batch.response_lengths:
        raise ValueError(
            f"--custom-tis-function-path {args.custom_tis_function_path} returned loss masks of {lengths} tokens for "
            f"responses of {batch.response_lengths}"
        )


def _entropy_term(
    args: Any, batch: MicroBatch, entropy: Tensor | None, metrics: StepMetrics, norm: float
) -> Tensor | float:
    if entropy is None:
        if getattr(args, "entropy_coef", 0.0):
            raise ValueError(f"--entropy-coef {args.entropy_coef}: the backend computed no entropy")
        return 0.0
    mean = batch.reducer(entropy) / norm
    metrics.add("train/entropy_loss", mean)
    coefficient = float(getattr(args, "entropy_coef", 0.0))
    # Left out, not multiplied by zero: an entropy that is only observed must not reach the loss, NaN or not.
    return -coefficient * mean if coefficient else 0.0


def _kl_term(args: Any, batch: MicroBatch, inputs: _PolicyInputs, metrics: StepMetrics, norm: float) -> Tensor | float:
    if not _flag(args, "use_kl_loss"):
        return 0.0
    ref = batch.flat("ref_log_probs")
    if ref is None:
        raise ValueError("--use-kl-loss: the batch has no ref_log_probs; was the reference model loaded (--ref-load)?")
    metrics.add("train/nonfinite_tokens", (inputs.valid & ~torch.isfinite(ref)).sum())
    valid = inputs.valid & torch.isfinite(ref)
    here, base = torch.where(valid, inputs.log_probs, 0.0), torch.where(valid, ref, 0.0)
    ratio = importance_ratio(here, torch.where(valid, inputs.old, 0.0)) if _flag(args, "use_unbiased_kl") else None
    kl_loss = batch.reducer(compute_approx_kl(here, base, args.kl_loss_type, ratio)) / norm
    metrics.add("train/kl_loss", kl_loss)
    coefficient = float(getattr(args, "kl_loss_coef", 0.0))
    return coefficient * kl_loss if coefficient else 0.0


def _add_ess(batch: MicroBatch, metrics: StepMetrics, inputs: _PolicyInputs) -> None:
    """Effective sample size (sum w)^2 / (n sum w^2) of each sample's importance weights, averaged over samples."""
    weight = torch.where(inputs.valid, ratio_of(inputs.log_ratio.detach()), 0.0)
    counts = batch.per_sample(inputs.valid.float())
    square_of_sum, sum_of_squares = batch.per_sample(weight).square(), batch.per_sample(weight.square())
    ess = square_of_sum / (counts.clamp(min=1.0) * sum_of_squares.clamp(min=1e-8))
    counted = counts > 0
    metrics.add_ratio("train/ess_ratio", torch.where(counted, ess, 0.0).double().sum(), counted.sum())
