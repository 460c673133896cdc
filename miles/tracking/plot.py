"""`reward.png`: reward and evaluations over steps, and how far trainer and engine disagree; the loss where nothing else is."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from miles.tracking.summary import History

Points = Sequence[tuple[int, float]]

_INK, _FAINT, _GRID = "#22223b", "#8d99ae", "#e9ecef"
_REWARD, _EVALS, _MISMATCH = "#0077b6", ("#e85d04", "#6a994e", "#9d4edd", "#bc4749"), "#9d0208"
_SMOOTHING = 0.25  # weight of a new step in the running mean; 0.25 looks back about four steps
_EDGE = 5
_MANY = 60  # above so many steps the single ones are drawn small


def draw_rewards(history: History, path: Path, title: str) -> Path | None:
    """Draw the run. Returns: `path`, or None where there is neither a reward, nor an evaluation, nor a loss."""
    rewards, evals = history.rewards(), history.evals()
    mismatch = history.series("train/train_rollout_logprob_abs_diff")
    loss = [] if rewards or evals else history.series("train/loss")
    if not (rewards or evals or loss):
        return None
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    heights = [3, 1.25] if mismatch else [1]
    with plt.rc_context(_style()):
        figure, axes = plt.subplots(
            len(heights),
            1,
            figsize=(9, 6.2 if mismatch else 4.6),
            height_ratios=heights,
            squeeze=False,
            layout="constrained",
        )
        _draw_steps(axes[0, 0], rewards or loss, "loss" if loss else "reward", title)
        _draw_evals(axes[0, 0], evals)
        axes[0, 0].legend(frameon=False, loc="best", fontsize=9)
        if mismatch:
            _draw_mismatch_panel(axes[1, 0], mismatch)
        axes[-1, 0].set_xlabel("optimizer step" if loss or not _same_axis(rewards, mismatch) else "step")
        figure.savefig(path, dpi=150)
        plt.close(figure)
    return path


def _same_axis(rewards: Points, mismatch: Points) -> bool:
    return not mismatch or not rewards or rewards[-1][0] == mismatch[-1][0]


def _style() -> Any:
    return {
        "font.size": 10,
        "text.color": _INK,
        "axes.edgecolor": _FAINT,
        "axes.labelcolor": _INK,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.grid": True,
        "grid.color": _GRID,
        "axes.axisbelow": True,
        "xtick.color": _INK,
        "ytick.color": _INK,
    }


def _draw_steps(axis: Any, points: Points, what: str, title: str) -> None:
    axis.set_title(title, loc="left", fontweight="bold", fontsize=12)
    axis.set_ylabel(f"mean {what}")
    if points:
        steps, values = zip(*points, strict=True)
        small = len(values) > _MANY
        axis.plot(
            steps, values, "o", color=_REWARD, alpha=0.35, ms=2.5 if small else 4, mew=0, label=f"{what}, each step"
        )
        axis.plot(steps, running_mean(values), color=_REWARD, lw=2.2, label=f"{what}, running mean")
        course = f"{what} {_edge_mean(values[:_EDGE]):.2f} to {_edge_mean(values[-_EDGE:]):.2f}"
        axis.set_title(f"{course} (mean of first and last {min(_EDGE, len(values))} steps)", loc="right", fontsize=9)
    axis.margins(x=0.02, y=0.08)


def _draw_evals(axis: Any, evals: Mapping[str, Points]) -> None:
    for (name, points), colour in zip(evals.items(), _EVALS * len(evals), strict=False):
        steps, values = zip(*points, strict=True)
        axis.plot(steps, values, "D--", color=colour, lw=1.1, ms=6, mec="white", mew=0.8, label=f"evaluation: {name}")


def _draw_mismatch_panel(axis: Any, points: Points) -> None:
    steps, values = zip(*points, strict=True)
    axis.plot(steps, values, color=_MISMATCH, lw=1.4, marker="o" if len(values) <= _MANY else None, ms=3)
    axis.set_ylabel("|Δ log-prob|")
    axis.set_title("trainer against engine, mean over sampled tokens", loc="left", fontsize=9, color=_FAINT)
    positive = [v for v in values if v > 0 and math.isfinite(v)]
    if positive and max(positive) / min(positive) > 50 and len(positive) == len(values):
        axis.set_yscale("log")
    elif positive:
        axis.set_ylim(0, max(positive) * 1.15)
    axis.yaxis.set_major_formatter(lambda value, _: f"{value:.3g}".replace("e-0", "e-"))
    axis.margins(x=0.02)


def _edge_mean(values: Sequence[float]) -> float:
    finite = [value for value in values if math.isfinite(value)]
    return math.fsum(finite) / len(finite) if finite else math.nan


def running_mean(values: Sequence[float]) -> list[float]:
    """Exponential mean, corrected for its start; steps without a number leave it as it was."""
    out, mean, weight = [], 0.0, 0.0
    for value in values:
        if math.isfinite(value):
            mean += _SMOOTHING * (value - mean)
            weight += _SMOOTHING * (1 - weight)
        out.append(mean / weight if weight else math.nan)
    return out
