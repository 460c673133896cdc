"""Corrections for the gap between the engine's and the trainer's probabilities, under the public hook signature.

m = p_trainer / p_engine, per sampled token, with the trainer's weights before the update. A correction multiplies the
policy loss by f(m). A hook replaces the built-in by `--custom-tis-function-path`:

    f(args, *, pg_loss, train_log_probs, rollout_log_probs, loss_masks, total_lengths, response_lengths,
      parallel_state, max_seq_lens) -> (pg_loss, loss_masks, metrics)

All are passed by keyword. `parallel_state.cp` has rank 0 and size 1 and `max_seq_lens` is None, whatever the trainer's
layout: a hook sees whole responses. Log-probs and masks are lists with one tensor a sample; `pg_loss` and every metric are flat, `[R]`. Tokens that the
returned masks have lost leave the numerator of the loss; the denominators stay.

A correction that needs sums over the whole optimizer step (to normalise its weights, say) has two attributes:
`needs_step_sums(args) -> bool`, and `step_sums(args, *, train_log_probs, rollout_log_probs, loss_masks) -> [k]`, sums over the
samples it is given. The trainer adds them over all ranks and micro-batches and passes the total as keyword `step_sums`.
`setting_problems(args) -> list of texts` is asked before a run starts, `settings` names keys that the correction reads.
Source: Miles v0.1 article, section 4.2.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from miles.backends.training_utils.loss_hub.policy_loss import ratio_of
from miles.utils.imports import load_function


@dataclass(frozen=True)
class GroupView:
    """A process group as a hook sees it."""

    rank: int = 0
    size: int = 1


@dataclass(frozen=True)
class HookParallelState:
    """The layout as a hook sees it: responses are not sharded."""

    cp: GroupView = GroupView()
    tp: GroupView = GroupView()


CorrectionResult = tuple[Tensor, list[Tensor], dict[str, Tensor]]


def vanilla_tis_function(
    args: Any,
    *,
    pg_loss: Tensor,
    train_log_probs: Sequence[Tensor] | None,
    rollout_log_probs: Sequence[Tensor] | None,
    loss_masks: Sequence[Tensor],
    **kwargs: Any,
) -> CorrectionResult:
    """Truncated importance sampling: the ratio clamped to [`--tis-clip-low`, `--tis-clip`]."""
    ratio = _ratio(train_log_probs, rollout_log_probs)
    weight = ratio.clamp(args.tis_clip_low, args.tis_clip)
    return pg_loss * weight, list(loss_masks), _metrics(ratio, weight)


def icepop_function(
    args: Any,
    *,
    pg_loss: Tensor,
    train_log_probs: Sequence[Tensor] | None,
    rollout_log_probs: Sequence[Tensor] | None,
    loss_masks: Sequence[Tensor],
    **kwargs: Any,
) -> CorrectionResult:
    """Clip or pop: the ratio itself inside the interval, and 0 outside: such a token does not train."""
    ratio = _ratio(train_log_probs, rollout_log_probs)
    inside = (ratio >= args.tis_clip_low) & (ratio <= args.tis_clip)
    weight = torch.where(inside, ratio, 0.0)
    return pg_loss * weight, list(loss_masks), _metrics(ratio, weight)


def check_sides(
    train: Sequence[Tensor] | None, rollout: Sequence[Tensor] | None
) -> tuple[Sequence[Tensor], Sequence[Tensor]]:
    """Both, or ValueError saying which is missing."""
    if train is None or rollout is None:
        side = "trainer's" if train is None else "engine's"
        raise ValueError(f"the correction compares log-probs of both sides, and the {side} are missing from the batch")
    return train, rollout


def correction_of(args: Any) -> Callable[..., Any] | None:
    """The function that `--use-tis` or `--get-mismatch-metrics` runs; None without either."""
    if not (getattr(args, "use_tis", False) or getattr(args, "get_mismatch_metrics", False)):
        return None
    return load_function(getattr(args, "custom_tis_function_path", None)) or vanilla_tis_function


def needs_step_sums(args: Any) -> bool:
    """Whether the correction wants sums over the whole step, and so log-probs of the whole step before it starts."""
    asks = getattr(correction_of(args), "needs_step_sums", None)
    return bool(asks is not None and asks(args))


def local_step_sums(
    args: Any,
    train_log_probs: Sequence[Tensor] | None,
    rollout_log_probs: Sequence[Tensor] | None,
    loss_masks: Sequence[Tensor],
) -> Tensor | None:
    """This rank's part of the step's sums, fp64 `[k]`; None where the correction wants none."""
    if not needs_step_sums(args):
        return None
    train, rollout = check_sides(train_log_probs, rollout_log_probs)
    step_sums: Any = getattr(correction_of(args), "step_sums", None)
    return step_sums(args, train_log_probs=train, rollout_log_probs=rollout, loss_masks=loss_masks)


def _ratio(train: Sequence[Tensor] | None, rollout: Sequence[Tensor] | None) -> Tensor:
    train, rollout = check_sides(train, rollout)
    return ratio_of(torch.cat(list(train)).detach() - torch.cat(list(rollout)).detach())


def _metrics(ratio: Tensor, weight: Tensor) -> dict[str, Tensor]:
    return {"tis": ratio, "tis_clipfrac": (weight != ratio).float(), "tis_abs": (ratio - 1).abs()}
