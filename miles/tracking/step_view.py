"""One step as people read it: the few numbers that matter, out of all its metrics."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

BLOCKS = "▁▂▃▄▅▆▇█"

# Where a step's time goes: label, the driver's timer, colour.
PHASES = (
    ("generate", "perf/train_wait_time", "cyan"),
    ("train", "perf/train_time", "magenta"),
    ("update", "perf/update_weights_time", "green"),
)
OTHER = ("other", "bright_black")


@dataclass
class StepView:
    """The numbers of one step; None where a step has none of that kind.

    Attributes:
        shares: part of the step's time by phase, `other` included; they add up to 1.
        staleness: weight versions between the published one and the batch's oldest token.
        evals: mean reward by data set.
    """

    rollout_id: int
    reward: float | None = None
    loss: float | None = None  # of supervised training, which has no rewards
    length: float | None = None
    truncated: float | None = None
    tokens_per_s: float | None = None
    staleness: float | None = None
    mismatch: float | None = None
    seconds: float | None = None
    shares: dict[str, float] = field(default_factory=dict)
    evals: dict[str, float] = field(default_factory=dict)

    @classmethod
    def of(
        cls, rollout_id: int, metrics: Mapping[str, Any], *, engines: int = 1, published: float | None = None
    ) -> StepView:
        """
        Args:
            metrics: everything that was logged in the step.
            engines: what `perf/tokens_per_gpu_per_sec` was divided by.
            published: weight version when the step began, for staleness where no metric has it.
        """
        get = lambda *names: next((_float(metrics[n]) for n in names if n in metrics), None)  # noqa: E731
        rate = get("perf/tokens_per_gpu_per_sec")
        supervised = "train/loss" in metrics and "train/pg_loss" not in metrics and not get("rollout/raw_reward")
        return cls(
            rollout_id,
            reward=None if supervised else get("rollout/raw_reward"),
            loss=get("train/loss") if supervised else None,
            length=get("rollout/response_len/mean", "rollout/response_lengths"),
            truncated=get("rollout/truncated_ratio"),
            tokens_per_s=None if rate is None else rate * engines,
            staleness=_staleness(get, published),
            mismatch=get("train/train_rollout_logprob_abs_diff"),
            seconds=get("perf/step_time"),
            shares=_shares(get),
            evals={
                name.removeprefix("eval/"): value
                for name in sorted(metrics)
                if name.startswith("eval/") and is_eval_score(name) and (value := _float(metrics[name])) is not None
            },
        )


def is_eval_score(name: str) -> bool:
    """Whether `eval/...` is a data set's mean reward, and not one of the metrics beside it."""
    rest = name.removeprefix("eval/")
    fixed = ("lag_steps", "duration_seconds", "export_time_seconds", "step")
    beside = ("-none_reward_ratio", "-truncated_ratio")
    return (
        "/" not in rest
        and "@" not in rest
        and rest not in fixed
        and not rest.endswith(beside)
        and not rest.startswith("skipped_")
    )


def _float(value: Any) -> float | None:
    return float(value) if isinstance(value, int | float) else None


def _staleness(get: Any, published: float | None) -> float | None:
    known = get("rollout/staleness/old_max", "rollout/fully_async/max_staleness")
    oldest = get("rollout/weight_version/min")
    if known is not None or oldest is None or published is None:
        return known
    return max(0.0, published - oldest)


def _shares(get: Any) -> dict[str, float]:
    total = get("perf/step_time")
    if not total:
        return {}
    shares = {label: min(1.0, (get(timer) or 0.0) / total) for label, timer, _ in PHASES}
    shares[OTHER[0]] = max(0.0, 1.0 - sum(shares.values()))
    return shares


def sparkline(values: Sequence[float], width: int = 40) -> str:
    """The last `width` values as blocks of eight heights."""
    values = [v for v in values[-width:] if math.isfinite(v)]
    if not values:
        return ""
    low, high = min(values), max(values)
    scale = (len(BLOCKS) - 1) / (high - low) if high > low else 0.0
    return "".join(BLOCKS[round((v - low) * scale)] for v in values)


def course(values: Sequence[float], width: int = 24) -> str:
    """All values as at most `width` blocks, each the mean of its part."""
    values = [v for v in values if math.isfinite(v)]
    if len(values) > width:
        edges = [round(i * len(values) / width) for i in range(width + 1)]
        values = [math.fsum(values[a:b]) / (b - a) for a, b in itertools.pairwise(edges)]
    return sparkline(values, width)


def number(value: float) -> str:
    """Three significant digits, thousands with commas."""
    if value != value:
        return "NaN"
    if abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:.3g}" if abs(value) >= 1e-3 or value == 0 else f"{value:.1e}"


def clock(seconds: float) -> str:
    """`1:05` or `2:03:04`."""
    minutes, s = divmod(int(seconds), 60)
    hours, m = divmod(minutes, 60)
    return f"{hours}:{m:02d}:{s:02d}" if hours else f"{m}:{s:02d}"


def plain_line(view: StepView, end: int) -> str:
    """One line for a log, the same fields at the same places in every step."""
    width = len(str(end))
    parts = [f"step {view.rollout_id + 1:>{width}}/{end}"]
    if view.reward is not None:
        parts.append(f"reward {view.reward:6.3f}")
    if view.loss is not None:
        parts.append(f"loss {view.loss:.4f}")
    if view.length is not None:
        parts.append(f"length {view.length:5.1f}")
    if view.truncated:
        parts.append(f"truncated {view.truncated:.0%}")
    if view.tokens_per_s is not None:
        parts.append(f"{view.tokens_per_s:7,.0f} tokens/s")
    if view.staleness is not None:
        parts.append(f"stale {view.staleness:g}")
    if view.mismatch is not None:
        parts.append(f"|dlogp| {view.mismatch:.1e}")
    if view.seconds is not None:
        shares = ", ".join(f"{label} {share:.0%}" for label, share in view.shares.items())
        parts.append(f"{view.seconds:6.2f} s ({shares})")
    parts += [f"eval {name} {score:.3f}" for name, score in view.evals.items()]
    return " | ".join(parts)
