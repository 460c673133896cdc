"""Masked importance sampling: weights and rejections at the level of tokens or of whole responses, set by YAML.

    --use-tis --custom-tis-function-path miles.backends.training_utils.loss_hub.mis.compute_mis_weights_with_cp
    --custom-config-path mis.yaml

m_t = p_trainer / p_engine of a sampled token, d_t = log m_t, both with the trainer's weights before the update. A *level*
makes one ratio of them for each token: `token`: m_t; `sequence`: their product over the response; `geometric`: their
geometric mean. A *mode* bounds it: `truncate` cuts it to at most u, `clip` to [l, u], `mask` leaves it and takes tokens
outside [l, u] out of the loss. *Rejection* takes tokens out by a ratio and bounds of its own, and a *veto* takes out a whole
response for a single token. With `tis_batch_normalize` weights are divided by their mean over the whole optimizer step, all
ranks and micro-batches, so that a step is the same however it is split.

Sources: Miles v0.1 article, section 4.2; Yao et al. 2025 (truncation); Ling Team 2025, IcePop (masking); Zheng et al. 2025,
GSPO (the geometric level).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor

from miles.backends.training_utils.loss_hub.corrections import CorrectionResult, check_sides
from miles.backends.training_utils.loss_hub.mis_metrics import sequence_metrics
from miles.backends.training_utils.loss_hub.policy_loss import ratio_of

LEVELS, MODES = ("token", "sequence", "geometric"), ("truncate", "clip", "mask")


@dataclass(frozen=True)
class MISSettings:
    """Keys of the YAML file. None: 1 / `tis_upper_bound` for the lower bound, the `tis_` setting for an `rs_` one."""

    tis_mode: str = "truncate"
    tis_level: str = "token"
    tis_upper_bound: float = 2.0
    tis_lower_bound: float | None = None
    tis_batch_normalize: bool = False
    use_rs: bool = False
    rs_level: str | None = None
    rs_upper_bound: float | None = None
    rs_lower_bound: float | None = None
    rs_veto_threshold: float | None = None

    @classmethod
    def of(cls, args: Any) -> MISSettings:
        return cls(**{f.name: getattr(args, f.name) for f in fields(cls) if hasattr(args, f.name)})

    @property
    def tis_bounds(self) -> tuple[float, float]:
        low = self.tis_lower_bound
        return 1.0 / self.tis_upper_bound if low is None else low, self.tis_upper_bound

    @property
    def rs_bounds(self) -> tuple[float, float]:
        low, high = self.tis_bounds
        return (
            low if self.rs_lower_bound is None else self.rs_lower_bound,
            high if self.rs_upper_bound is None else self.rs_upper_bound,
        )


def setting_problems(args: Any) -> list[str]:
    """What is wrong with the settings, all at once."""
    s = MISSettings.of(args)
    choices = {"tis_mode": (s.tis_mode, MODES), "tis_level": (s.tis_level, LEVELS)}
    if s.rs_level is not None:
        choices["rs_level"] = (s.rs_level, LEVELS)
    problems = [
        f"{name} {value!r} is not one of {', '.join(known)}"
        for name, (value, known) in choices.items()
        if value not in known
    ]
    numbers = ("tis_upper_bound", "tis_lower_bound", "rs_upper_bound", "rs_lower_bound", "rs_veto_threshold")
    bad = [name for name in numbers if not _is_positive_or_unset(getattr(s, name))]
    problems += [f"{name} {getattr(s, name)!r} is not a number above 0" for name in bad]
    problems += [
        f"{name} {getattr(s, name)!r} is not true or false"
        for name in ("tis_batch_normalize", "use_rs")
        if not isinstance(getattr(s, name), bool)
    ]
    if s.tis_upper_bound is None:
        problems.append("tis_upper_bound is unset")
    elif not bad:
        problems += [
            f"{kind}_lower_bound {low:g} is above {kind}_upper_bound {high:g}"
            for kind, used, (low, high) in (("tis", True, s.tis_bounds), ("rs", s.use_rs, s.rs_bounds))
            if used and low > high
        ]
    if s.tis_batch_normalize and s.tis_level == "geometric":
        problems.append("tis_batch_normalize works with tis_level token or sequence, not geometric")
    if s.tis_batch_normalize and getattr(args, "skip_actor_forward_only", False):
        problems.append("tis_batch_normalize needs scores of the whole batch first: drop --skip-actor-forward-only")
    return problems


def _is_positive_or_unset(value: Any) -> bool:
    return value is None or (isinstance(value, int | float) and not isinstance(value, bool) and value > 0)


@dataclass(frozen=True)
class _Corrected:
    """One response, `[response]` each: its weights before any normalisation, its mask after rejection, its metrics."""

    weight: Tensor
    mask: Tensor
    metrics: dict[str, Tensor]


def compute_mis_weights(
    args: Any,
    *,
    train_log_probs: Sequence[Tensor],
    rollout_log_probs: Sequence[Tensor],
    loss_masks: Sequence[Tensor],
    step_sums: Tensor | None = None,
) -> tuple[list[Tensor] | None, list[Tensor], dict[str, list[Tensor]]]:
    """Weights, masks and metrics of each response; lists of `[response]`.

    Args:
        step_sums: what `MISCorrection.step_sums` gives, over the whole step; None: over these samples.
    Returns: weights None, and the masks as they came, without `--use-tis`: then only the metrics count.
    """
    s = MISSettings.of(args)
    done = _correct_all(s, train_log_probs, rollout_log_probs, loss_masks)
    factor = torch.ones(())
    if s.tis_batch_normalize:
        total, count = (_sums(s, done) if step_sums is None else step_sums).tolist()
        factor = torch.tensor(total / count if count and total else 1.0)
    weights = [one.weight / factor.to(one.weight) for one in done]
    metrics: dict[str, list[Tensor]] = {}
    for one, weight in zip(done, weights, strict=True):
        final = weight * (one.mask > 0)
        kept = final[one.mask > 0] if bool((one.mask > 0).any()) else final.new_zeros(1)
        found = one.metrics | {
            "is_ratio_mean_after_tis_rs": one.weight * (one.mask > 0),
            "batch_norm_factor": factor.to(weight).expand_as(weight),
            "is_ratio_mean_final": final,
            "is_ratio_min_final": kept.min().expand_as(weight),
            "is_ratio_max_final": kept.max().expand_as(weight),
        }
        for name, value in found.items():
            metrics.setdefault(f"mis_{name}", []).append(value.float())
    if not getattr(args, "use_tis", False):
        return None, list(loss_masks), metrics
    return weights, [one.mask for one in done], metrics


class MISCorrection:
    """The correction for `--custom-tis-function-path`. Responses come whole, whatever the trainer's layout."""

    settings = tuple(f.name for f in fields(MISSettings))

    def __call__(
        self,
        args: Any,
        *,
        pg_loss: Tensor,
        train_log_probs: Sequence[Tensor] | None,
        rollout_log_probs: Sequence[Tensor] | None,
        loss_masks: Sequence[Tensor],
        step_sums: Tensor | None = None,
        **kwargs: Any,
    ) -> CorrectionResult:
        train, rollout = check_sides(train_log_probs, rollout_log_probs)
        weights, masks, metrics = compute_mis_weights(
            args, train_log_probs=train, rollout_log_probs=rollout, loss_masks=loss_masks, step_sums=step_sums
        )
        flat = {name: torch.cat(values) for name, values in metrics.items()}
        return pg_loss if weights is None else pg_loss * torch.cat(weights), masks, flat

    def setting_problems(self, args: Any) -> list[str]:
        return setting_problems(args)

    def needs_step_sums(self, args: Any) -> bool:
        return MISSettings.of(args).tis_batch_normalize

    def step_sums(
        self,
        args: Any,
        *,
        train_log_probs: Sequence[Tensor],
        rollout_log_probs: Sequence[Tensor],
        loss_masks: Sequence[Tensor],
    ) -> Tensor:
        """fp64 `[2]`: the sum of the weights that stay, and how many: tokens, or responses at the sequence level."""
        s = MISSettings.of(args)
        return _sums(s, _correct_all(s, train_log_probs, rollout_log_probs, loss_masks))


def _correct_all(
    s: MISSettings, train: Sequence[Tensor], rollout: Sequence[Tensor], masks: Sequence[Tensor]
) -> list[_Corrected]:
    return [_correct(s, p.detach(), q.detach(), m) for p, q, m in zip(train, rollout, masks, strict=True)]


def _correct(s: MISSettings, train: Tensor, rollout: Tensor, mask: Tensor) -> _Corrected:
    trains = mask > 0
    d = torch.where(trains, train - rollout, 0.0)
    raw = ratio_at(s.tis_level, d, trains)
    weight, mask, metrics = _bound(s, raw, mask)
    if s.use_rs:
        low, high = s.rs_bounds
        ratio = ratio_at(s.rs_level or s.tis_level, d, trains)
        mask = mask * ((ratio >= low) & (ratio <= high))
        metrics |= {"rs_mask_fraction_low": ratio < low, "rs_mask_fraction_high": ratio > high}
    if s.use_rs and s.rs_veto_threshold is not None:
        catastrophic = trains & (ratio_of(d) < s.rs_veto_threshold)
        vetoed = catastrophic.any()
        mask = mask * ~vetoed
        metrics["rs_catastrophic_token_fraction"] = catastrophic
        metrics["rs_catastrophic_seq_fraction"] = vetoed.expand_as(d)
    metrics |= {"tis_weight_before_bound": raw, "tis_weight_after_bound": weight}
    return _Corrected(weight, mask, metrics | sequence_metrics(train, rollout, trains))


def ratio_at(level: str, d: Tensor, trains: Tensor) -> Tensor:
    """exp of the log-weight of a level, which is clamped to 20 either way; `d` `[response]` is 0 at masked tokens."""
    if level == "token":
        return ratio_of(d)
    total = d.sum()
    if level == "geometric":
        total = total / trains.sum().clamp(min=1)
    return ratio_of(total).expand_as(d)


def _bound(s: MISSettings, raw: Tensor, mask: Tensor) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    low, high = s.tis_bounds
    if s.tis_mode == "truncate":
        return raw.clamp(0.0, high), mask, {"tis_truncate_fraction": raw > high}
    below, above = raw < low, raw > high
    if s.tis_mode == "clip":
        return raw.clamp(low, high), mask, {"tis_clip_fraction_low": below, "tis_clip_fraction_high": above}
    return raw, mask * ~(below | above), {"tis_mask_fraction_low": below, "tis_mask_fraction_high": above}


def _sums(s: MISSettings, done: Sequence[_Corrected]) -> Tensor:
    total = torch.zeros(2, dtype=torch.float64)
    for one in done:
        kept = one.weight[one.mask > 0].double()
        if s.tis_level == "sequence":
            kept = kept[:1]  # a response counts once
        total += torch.tensor([float(kept.sum()), kept.numel()], dtype=torch.float64)
    return total


compute_mis_weights_with_cp = MISCorrection()
# The public name for a trainer whose responses are never sharded.
compute_mis_weights_fsdp = compute_mis_weights_with_cp
