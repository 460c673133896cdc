"""What the run is doing, live: a panel on a terminal, one line a step in a log."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Mapping
from typing import Any, TextIO

from rich.console import Console, Group
from rich.live import Live
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from miles.tracking.step_view import OTHER, PHASES, StepView, clock, number, plain_line, sparkline

_DOING = {
    "train_wait": "generating",
    "train": "training",
    "update_weights": "updating the engines' weights",
    "eval": "evaluating",
    "save": "saving",
    "release_engines": "taking the engines' memory",
    "wake_trainer": "loading the trainer's memory",
    "sleep_trainer": "saving the trainer's memory",
    "resume_engines": "giving the engines their memory",
}
_BAR_WIDTH = 48


class Progress:
    """Driver-side. `begin`, then `phase` and `step` as the run goes, `status` for anything before it, and `close`."""

    def __init__(self, args: Any, file: TextIO | None = None) -> None:
        self.args = args
        self.file = file or sys.stdout
        self.console = Console(file=self.file)
        self.rewards: list[float] = []
        self.losses: list[float] = []
        self.view: StepView | None = None
        self.evals: dict[str, float] = {}
        self.first = self.end = 0
        self._published: float | None = None
        self._doing, self._since = "starting", time.monotonic()
        self._began = time.monotonic()
        self._live: Live | None = None
        if self.console.is_terminal and self.console.encoding.lower().startswith("utf"):
            self._live = Live(self, console=self.console, refresh_per_second=4, transient=False)
            self._live.start()

    # ---- what happens --------------------------------------------------------------------------------------------

    def status(self, text: str) -> None:
        """Something before the first step, such as "starting engines"."""
        self._doing, self._since = text, time.monotonic()
        if self._live is None:
            self._print(text)

    def begin(self, first: int, end: int) -> None:
        """The loop starts: rollout ids `first` to `end - 1`."""
        self.first, self.end, self._began = first, end, time.monotonic()

    def phase(self, name: str) -> None:
        self._doing, self._since = _DOING.get(name, name), time.monotonic()

    def step(self, rollout_id: int, metrics: Mapping[str, Any]) -> None:
        """A step has ended; `metrics` is everything that was logged in it."""
        engines = getattr(self.args, "rollout_num_gpus", None) or 1
        self.view = view = StepView.of(rollout_id, metrics, engines=engines, published=self._published)
        self._published = metrics.get("rollout/weight_version/published", self._published)
        if view.reward is not None:
            self.rewards.append(view.reward)
        if view.loss is not None:
            self.losses.append(view.loss)
        self.evals |= view.evals
        if self._live is None:
            self._print(plain_line(view, self.end))

    def close(self) -> None:
        """Leave the last state on the screen. Harmless when repeated."""
        if self._live is not None:
            self._doing = ""
            self._live.stop()
            self._live = None

    def _print(self, line: str) -> None:
        with contextlib.suppress(BrokenPipeError, ValueError):  # the log's reader is gone; the run goes on
            print(line, file=self.file, flush=True)

    # ---- the panel -----------------------------------------------------------------------------------------------

    def __rich__(self) -> Panel:
        rows = Table.grid(padding=(0, 2))
        rows.add_column(style="bright_black", justify="right")
        rows.add_column()
        parts: list[Any] = [rows]
        if self.view is not None:
            self._add_numbers(rows, self.view)
            if self.view.shares:
                rows.add_row("last step", _time_bar(self.view))
        if self._doing:
            parts.append(Text(f"  {self._doing}, {clock(time.monotonic() - self._since)}", style="italic"))
        return Panel(Group(*parts), title=self._title(), title_align="left", border_style="blue", padding=(0, 1))

    def _title(self) -> str:
        name = getattr(self.args, "run_name", None) or "miles"
        done = 0 if self.view is None else self.view.rollout_id + 1 - self.first
        if not self.end:
            return str(name)
        passed = time.monotonic() - self._began
        title = f"{name} · step {self.first + done}/{self.end} · {clock(passed)}"
        left = self.end - self.first - done
        return title + (f", about {clock(passed / done * left)} left" if done and left else "")

    def _add_numbers(self, rows: Table, view: StepView) -> None:
        for name, value, past in (("reward", view.reward, self.rewards), ("loss", view.loss, self.losses)):
            if value is not None:
                rows.add_row(name, Text.assemble((f"{value:.3f}", "bold"), "  ", (sparkline(past), "cyan")))
        if self.evals:
            rows.add_row("eval", "   ".join(f"{name} [bold]{score:.3f}[/bold]" for name, score in self.evals.items()))
        speed = [] if view.tokens_per_s is None else [f"{number(view.tokens_per_s)} tokens/s"]
        speed += [] if view.length is None else [f"length {number(view.length)}"]
        speed += [f"truncated {view.truncated:.0%}"] if view.truncated else []
        if speed:
            rows.add_row("rollout", " · ".join(speed))
        agreement = [] if view.staleness is None else [f"{view.staleness:g} versions behind"]
        agreement += [] if view.mismatch is None else [f"|Δ log-prob| {number(view.mismatch)}"]
        if agreement:
            rows.add_row("policy", " · ".join(agreement))


def _time_bar(view: StepView) -> Text:
    """`6.2 s ████▓▓░ generate 55 % · train 38 % ...`, each phase in its colour."""
    colours = {label: colour for label, _, colour in PHASES} | {OTHER[0]: OTHER[1]}
    text = Text(f"{view.seconds:.1f} s  ")
    edge = used = 0.0
    for label, share in view.shares.items():
        edge += share * _BAR_WIDTH
        cells = round(edge) - round(used)
        used = edge
        text.append("█" * cells, style=colours[label])
    text.append("\n")
    for i, (label, share) in enumerate(view.shares.items()):
        text.append(" · " if i else "")
        text.append(f"{label} {share:.0%}", style=colours[label])
    return text
