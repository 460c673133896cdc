"""A plan for the eye."""

from __future__ import annotations

import shutil
import sys
from typing import Any, TextIO

QUIET = ("given", "derived")  # in plan.json, too long for the screen
_MANY = 12


def render_plan(plan: dict[str, Any], file: TextIO | None = None) -> None:
    """Print the plan: one block a section, one line a fact."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    out = file or sys.stdout
    width = shutil.get_terminal_size((120, 40)).columns if out.isatty() else 140
    console = Console(file=out, width=width, highlight=False, soft_wrap=False)
    for name, section in plan.items():
        if name in QUIET or not section:
            continue
        console.print(Text(name, style="bold"))
        table = Table(box=None, show_header=False, padding=(0, 2, 0, 2))
        table.add_column(no_wrap=True)
        table.add_column(overflow="fold")
        for key, value in _rows(section):
            table.add_row(Text(key), Text(value))
        console.print(table)
    console.print(
        Text(f"{len(plan.get('derived', {}))} values were derived; the plan.json of a run lists every flag and why.")
    )


def _rows(section: Any) -> list[tuple[str, str]]:
    if isinstance(section, list):
        return [("!", str(item)) for item in section]
    rows: list[tuple[str, str]] = []
    for key, value in section.items():
        if not isinstance(value, dict):
            rows.append((str(key), "" if value is None else str(value)))
            continue
        items = list(value.items())
        shown = (
            items
            if len(items) <= _MANY
            else [*items[: _MANY - 2], ("...", f"{len(items) - _MANY + 1} more"), items[-1]]
        )
        rows += [(f"{key} / {name}" if key != "processes" else str(name), str(item)) for name, item in shown]
    return rows
