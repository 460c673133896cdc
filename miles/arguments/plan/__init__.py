"""The resolved plan of a run: what `--dry-run` prints, and every run writes to plan.json."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from miles.arguments.args import Args
from miles.arguments.plan import contracts, sections
from miles.arguments.plan.render import render_plan
from miles.utils.atomic_io import write_atomic

__all__ = ["build_plan", "render_plan", "write_plan"]


def build_plan(args: Args) -> dict[str, Any]:
    """Everything that is decided before a process starts, as plain data.

    Returns: sections by name; each is a mapping of names to texts, numbers, lists or mappings.
    """
    return {
        "run": sections.run(args),
        "placement": sections.placement(args),
        "batch": sections.batch(args),
        "trainer": sections.trainer(args),
        "rollout": sections.rollout(args),
        "weight update": sections.weight_update(args),
        "evaluation": sections.evaluation(args),
        "contracts": contracts.describe(args),
        "hooks": sections.hooks(args),
        "files": sections.files(args),
        "given": sections.given(args),
        "derived": dict(sorted(args.derived.items())),
        "warnings": sections.warnings(args),
    }


def write_plan(plan: dict[str, Any], args: Args) -> Path:
    """Write the plan, and every flag's value, to plan.json in the run folder; returns its path."""
    path = Path(args.run_dir) / "plan.json"
    text = json.dumps(plan | {"flags": args.to_dict()}, indent=2, default=str)
    write_atomic(path, text + "\n")
    return path
