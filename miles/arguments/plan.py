"""The resolved plan of a run: what `--dry-run` prints and every run writes to plan.json."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from miles.arguments.args import Args
from miles.utils.atomic_io import write_atomic


def build_plan(args: Args) -> dict[str, Any]:
    """Everything that is decided before a process starts, as plain data."""
    return {"run": {"name": args.run_name, "folder": args.run_dir}}


def render_plan(plan: dict[str, Any]) -> None:
    """Print the plan."""
    print(json.dumps(plan, indent=2))


def write_plan(plan: dict[str, Any], args: Args) -> Path:
    """Write plan.json to the run folder."""
    path = Path(args.run_dir) / "plan.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(path, json.dumps(plan, indent=2).encode())
    return path
