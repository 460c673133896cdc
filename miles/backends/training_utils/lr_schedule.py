"""Learning-rate and weight-decay schedules, with the names and the meaning that Megatron's flags have.

The step count is that of optimizer steps taken: the first one trains at `lr(0)`, which with warmup is `--lr-warmup-init`.
"""

from __future__ import annotations

import logging
import math
from dataclasses import asdict, dataclass
from typing import Any

logger = logging.getLogger(__name__)

DECAY_STYLES = ("constant", "linear", "cosine", "inverse-square-root", "WSD")
WSD_STYLES = ("exponential", "linear", "cosine", "minus_sqrt")
WEIGHT_DECAY_STYLES = ("constant", "linear", "cosine")


@dataclass(frozen=True)
class ScheduleConfig:
    """Shape of a schedule; lengths in optimizer steps."""

    max_lr: float
    min_lr: float = 0.0
    init_lr: float = 0.0
    decay_style: str = "constant"
    warmup_steps: float = 0
    decay_steps: int = 1
    wsd_decay_steps: int | None = None
    wsd_decay_style: str = "exponential"
    start_weight_decay: float = 0.0
    end_weight_decay: float = 0.0
    weight_decay_style: str = "constant"

    def __post_init__(self) -> None:
        problems = []
        if self.decay_style not in DECAY_STYLES:
            problems.append(f"--lr-decay-style {self.decay_style!r} is not one of {', '.join(DECAY_STYLES)}")
        if self.wsd_decay_style not in WSD_STYLES:
            problems.append(f"--lr-wsd-decay-style {self.wsd_decay_style!r} is not one of {', '.join(WSD_STYLES)}")
        if self.weight_decay_style not in WEIGHT_DECAY_STYLES:
            problems.append(
                f"--weight-decay-incr-style {self.weight_decay_style!r} is not one of {', '.join(WEIGHT_DECAY_STYLES)}"
            )
        if not 0 <= self.min_lr <= self.max_lr:
            problems.append(f"--min-lr {self.min_lr} must lie between 0 and --lr {self.max_lr}")
        if self.init_lr > self.max_lr:
            problems.append(f"--lr-warmup-init {self.init_lr} must not exceed --lr {self.max_lr}")
        if self.warmup_steps >= self.decay_steps and self.decay_style != "constant":
            problems.append(
                f"warmup of {self.warmup_steps} steps must be shorter than --lr-decay-iters {self.decay_steps}"
            )
        if self.decay_style == "WSD" and not 0 < (self.wsd_decay_steps or 0) <= self.decay_steps:
            problems.append(f"--lr-decay-style WSD needs --lr-wsd-decay-iters between 1 and {self.decay_steps}")
        if problems:
            raise ValueError("; ".join(problems))

    @classmethod
    def from_args(cls, args: Any, train_iters: int) -> ScheduleConfig:
        """From the public flags; `--lr-decay-iters` defaults to all optimizer steps of the run.

        `--lr-warmup-fraction` is a part of the decay length; exclusive with `--lr-warmup-iters`.
        """
        decay = int(_get(args, "lr_decay_iters") or max(train_iters, 1))
        fraction, iters = _get(args, "lr_warmup_fraction"), _get(args, "lr_warmup_iters") or 0
        if fraction is not None and iters:
            raise ValueError("--lr-warmup-fraction and --lr-warmup-iters both set the warmup: keep one")
        weight_decay = float(_get(args, "weight_decay") or 0.0)
        start, end = _get(args, "start_weight_decay"), _get(args, "end_weight_decay")
        return cls(
            max_lr=float(args.lr),
            min_lr=float(_get(args, "min_lr") or 0.0),
            init_lr=float(_get(args, "lr_warmup_init") or 0.0),
            decay_style=_get(args, "lr_decay_style") or "constant",
            warmup_steps=iters if fraction is None else float(fraction) * decay,
            decay_steps=decay,
            wsd_decay_steps=_get(args, "lr_wsd_decay_iters"),
            wsd_decay_style=_get(args, "lr_wsd_decay_style") or "exponential",
            start_weight_decay=weight_decay if start is None else float(start),
            end_weight_decay=weight_decay if end is None else float(end),
            weight_decay_style=_get(args, "weight_decay_incr_style") or "constant",
        )

    def lr(self, step: int) -> float:
        """Learning rate of the optimizer step that follows `step` taken ones."""
        if self.warmup_steps > 0 and step <= self.warmup_steps:
            return self.init_lr + (self.max_lr - self.init_lr) * step / self.warmup_steps
        if self.decay_style == "constant":
            return self.max_lr
        if step > self.decay_steps:
            return self.min_lr
        if self.decay_style == "inverse-square-root":
            lr = self.max_lr * math.sqrt(max(self.warmup_steps, 1)) / math.sqrt(max(step, 1))
            return max(self.min_lr, lr)
        return self.min_lr + self._decay_factor(step) * (self.max_lr - self.min_lr)

    def _decay_factor(self, step: int) -> float:
        """1 at the end of warmup, 0 at the end of the decay."""
        if self.decay_style == "WSD":
            decay = self.wsd_decay_steps or 1
            start = self.decay_steps - decay
            return 1.0 if step <= start else _anneal(self.wsd_decay_style, (step - start) / decay)
        return _anneal(self.decay_style, (step - self.warmup_steps) / (self.decay_steps - self.warmup_steps))

    def weight_decay(self, step: int) -> float:
        """Weight decay of that step, moving from start to end over the decay length."""
        if self.weight_decay_style == "constant":
            return self.end_weight_decay
        ratio = min(step / self.decay_steps, 1.0)
        grown = ratio if self.weight_decay_style == "linear" else 0.5 * (math.cos(math.pi * (1 - ratio)) + 1)
        return self.start_weight_decay + grown * (self.end_weight_decay - self.start_weight_decay)


def _anneal(style: str, ratio: float) -> float:
    if style == "linear":
        return 1.0 - ratio
    if style == "cosine":
        return 0.5 * (math.cos(math.pi * ratio) + 1.0)
    if style == "exponential":
        return 2.0 * 0.5**ratio - 1.0
    return 1.0 - math.sqrt(ratio)  # minus_sqrt


def _get(args: Any, name: str) -> Any:
    return getattr(args, name, None)


class LRSchedule:
    """Sets the learning rate and weight decay of an optimizer's groups.

    A group's `lr_mult` and `wd_mult` (default 1) multiply them, so that a group without decay stays without.
    """

    def __init__(self, optimizer: Any, config: ScheduleConfig) -> None:
        self.optimizer, self.config, self.num_steps = optimizer, config, 0
        self._apply()

    def step(self) -> None:
        """Count one optimizer step, and set the rates of the next."""
        self.num_steps += 1
        self._apply()

    def _apply(self) -> None:
        lr, decay = self.config.lr(self.num_steps), self.config.weight_decay(self.num_steps)
        for group in self.optimizer.param_groups:
            group["lr"] = lr * group.get("lr_mult", 1.0)
            group["weight_decay"] = decay * group.get("wd_mult", 1.0)

    def metrics(self) -> dict[str, float]:
        """`train/lr-pg_{i}`: the rates that the next step will use; read them before it."""
        return {f"train/lr-pg_{i}": float(g["lr"]) for i, g in enumerate(self.optimizer.param_groups)}

    def state_dict(self) -> dict[str, Any]:
        return {"num_steps": self.num_steps, "config": asdict(self.config)}

    def load_state_dict(self, state: dict[str, Any], *, use_checkpoint: bool = False, override: bool = False) -> None:
        """Continue from a checkpoint's step.

        Args:
            use_checkpoint: take the checkpoint's shape too, and warn where this run's flags say otherwise
                (`--use-checkpoint-lr-scheduler`; Megatron: `--use-checkpoint-opt_param-scheduler`).
            override: keep this run's shape (`--override-lr-scheduler`; Megatron: `--override-opt_param-scheduler`).
        Raises: ValueError naming each differing value, where neither is chosen.
        """
        saved = ScheduleConfig(**state["config"])
        if use_checkpoint and override:
            raise ValueError("the schedule comes from the checkpoint or from the flags: choose one of use and override")
        if saved != self.config and not override:
            ours, theirs = asdict(self.config), asdict(saved)
            differing = ", ".join(f"{k} is {ours[k]} and was {theirs[k]}" for k in ours if ours[k] != theirs[k])
            if not use_checkpoint:
                raise ValueError(
                    f"the learning-rate schedule differs from the checkpoint's: {differing}. Give the flags of the first "
                    "run, or choose with --override-lr-scheduler or --use-checkpoint-lr-scheduler "
                    "(Megatron: --override-opt_param-scheduler, --use-checkpoint-opt_param-scheduler)"
                )
            logger.warning("the checkpoint's learning-rate schedule stays in force; the flags differ: %s", differing)
            self.config = saved
        self.num_steps = int(state["num_steps"])
        self._apply()


def build_schedule(args: Any, optimizer: Any) -> LRSchedule:
    """The schedule over all optimizer steps of the run.

    Raises: ValueError where it needs the run's length and the flags do not say it.
    """
    steps = _train_steps(args)
    style = getattr(args, "lr_decay_style", None) or "constant"
    if steps is None and style != "constant" and not getattr(args, "lr_decay_iters", None):
        raise ValueError(
            f"--lr-decay-style {style} decays over the whole run, and --num-epoch leaves its length to the data: set "
            "--lr-decay-iters, or --num-rollout"
        )
    return LRSchedule(optimizer, ScheduleConfig.from_args(args, steps or 1))


def _train_steps(args: Any) -> int | None:
    """Optimizer steps of the whole run; None where its length comes from the data."""
    rollouts = getattr(args, "num_rollout", None)
    if rollouts is None:
        return None
    per_rollout = getattr(args, "num_steps_per_rollout", None)
    if not per_rollout:
        samples = args.rollout_batch_size * args.n_samples_per_prompt
        per_rollout = max(samples // (getattr(args, "global_batch_size", None) or samples), 1)
    return int(rollouts) * int(per_rollout)
