"""The end of a run: a table of what it did, and its plot, from `metrics.jsonl` alone.

`python -m miles.tracking.summary RUN_DIR` makes both again.
"""

from __future__ import annotations

import io
import sys
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from miles.tracking.sinks.jsonl import FILE_NAME, read_rows
from miles.tracking.statistics import mean
from miles.tracking.step_view import PHASES, course, is_eval_score, number
from miles.tracking.steps import EVAL, ROLLOUT

_EDGE = 5  # steps at each end that the table averages over


@dataclass
class History:
    """Metrics of a run by axis, name and step: `values["rollout/step"]["rollout/raw_reward"][3]`."""

    values: dict[str, dict[str, dict[int, float]]] = field(
        default_factory=lambda: defaultdict(lambda: defaultdict(dict))
    )
    seconds: float = 0.0

    @classmethod
    def read(cls, run_dir: str | Path) -> History:
        """Raises: FileNotFoundError that says what the folder should have, ValueError for a damaged file."""
        path = Path(run_dir) / FILE_NAME
        if not path.is_file():
            raise FileNotFoundError(f"{path} does not exist: {run_dir} is not the folder of a run that logged a step")
        history = cls()
        times = []
        for row in read_rows(path):
            times.append(row.get("_time", 0.0))
            for name, value in row.items():
                if name not in ("step_key", "step", "_time") and isinstance(value, int | float):
                    history.values[row["step_key"]][name][row["step"]] = float(value)
        history.seconds = times[-1] - times[0] if times else 0.0
        return history

    def series(self, name: str) -> list[tuple[int, float]]:
        """(step, value) of a metric, by step, on whichever axis it was logged."""
        for by_name in self.values.values():
            if name in by_name:
                return sorted(by_name[name].items())
        return []

    def rewards(self) -> list[tuple[int, float]]:
        """Mean reward of every step; empty for supervised training, whose samples all carry reward 0."""
        points = self.series("rollout/raw_reward")
        supervised = self.series("train/loss") and not self.series("train/pg_loss")
        return [] if supervised and not any(value for _, value in points) else points

    def evals(self) -> dict[str, list[tuple[int, float]]]:
        """Mean reward of every evaluated data set."""
        names = [name for name in self.values.get(EVAL, {}) if name.startswith("eval/") and is_eval_score(name)]
        return {name.removeprefix("eval/"): self.series(name) for name in sorted(names)}


def summarize(run_dir: str | Path, console: Console | None = None) -> Path | None:
    """Print the table and draw `reward.png`. Returns: the plot's path; None where nothing was logged to draw."""
    from miles.tracking.plot import draw_rewards

    console = console or Console()
    history = History.read(run_dir)
    _print_table(console, summary_table(history, str(run_dir)))
    console.print(time_line(history), highlight=False)
    picture = draw_rewards(history, Path(run_dir) / "reward.png", title=Path(run_dir).resolve().name)
    console.print(f"run folder  {run_dir}", soft_wrap=True, highlight=False)
    if picture is not None:
        console.print(f"plot        {picture}", soft_wrap=True, highlight=False)
    return picture


def _print_table(console: Console, table: Table) -> None:
    """Print a table, also where the output cannot show its blocks and letters."""
    if console.encoding.lower().startswith("utf"):
        console.print(table)
        return
    text = io.StringIO()
    Console(file=text, width=console.width).print(table)
    console.file.write(text.getvalue().encode(console.encoding, "replace").decode(console.encoding))


def summary_table(history: History, title: str) -> Table:
    """First and last steps of what matters."""
    table = Table(title=f"{Path(title).name}: first and last {_EDGE} steps", title_justify="left", header_style="bold")
    table.add_column("metric")
    table.add_column(f"first {_EDGE}", justify="right")
    table.add_column(f"last {_EDGE}", justify="right")
    table.add_column("best", justify="right")
    table.add_column("course", no_wrap=True)
    _add_series(table, "reward", history.rewards(), best=max)
    for name, points in history.evals().items():
        _add_series(table, f"eval {name}", points, best=max, edge=1)
    if not history.rewards():
        _add_series(table, "loss", history.series("train/loss"), best=min)
    _add_series(table, "response length", history.series("rollout/response_len/mean"))
    _add_series(table, "truncated", history.series("rollout/truncated_ratio"), best=min)
    _add_series(table, "|Δ log-prob|", history.series("train/train_rollout_logprob_abs_diff"), best=min)
    _add_series(table, "gradient norm", history.series("train/grad_norm"))
    _add_series(table, "seconds a step", history.series("perf/step_time"), best=min)
    _add_series(table, "tokens/s", history.series("perf/tokens_per_gpu_per_sec"), best=max)
    return table


def time_line(history: History) -> str:
    """`30 steps in 31.5 s: generate 48%, train 38%, update 5%, other 10%`."""
    steps = history.series("perf/step_time")
    total = sum(value for _, value in steps)
    shares = _where_time_went(history, total)
    return f"{len(steps)} steps in {total:.1f} s" + (f": {shares}" if shares else "")


def _add_series(
    table: Table, label: str, points: Sequence[tuple[int, float]], best: Any = None, edge: int = _EDGE
) -> None:
    values = [value for _, value in points]
    if not values:
        return
    finite = [value for value in values if value == value]
    table.add_row(
        label,
        number(mean(values[:edge])),
        number(mean(values[-edge:])),
        number(best(finite)) if best and finite else "",
        course(values),
    )


def _where_time_went(history: History, total: float) -> str:
    if not total:
        return ""
    rollout = history.values.get(ROLLOUT, {})
    parts, rest = [], total
    for label, timer, _ in PHASES:
        spent = sum(rollout.get(timer, {}).values())
        rest -= spent
        parts.append(f"{label} {spent / total:.0%}")
    return ", ".join([*parts, f"other {max(rest, 0.0) / total:.0%}"])


def main(argv: Sequence[str] | None = None) -> int:
    arguments = list(sys.argv[1:] if argv is None else argv)
    if len(arguments) != 1 or arguments[0].startswith("-"):
        print("usage: python -m miles.tracking.summary RUN_DIR", file=sys.stderr)
        return 2
    try:
        summarize(arguments[0])
    except (OSError, ValueError) as error:
        print(f"miles: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
