"""Runs of the quick-start recipe for the benchmarks that measure them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

REPO = Path(__file__).resolve().parents[2]


def run_quickstart(name: str, flags: list[str]) -> Path:
    """Run `recipes/quickstart.sh` with `flags` added and return its run folder; raises with its output if it fails."""
    run_dir = Path(tempfile.mkdtemp(prefix="miles-benchmark-")) / name
    environment = os.environ | {"MILES_SCRIPT_PYTHON": sys.executable, "MILES_SCRIPT_RUN_NAME": name}
    command = ["bash", str(REPO / "recipes/quickstart.sh"), "--run-dir", str(run_dir), *flags]
    print(f"running {name}", flush=True)
    done = subprocess.run(command, cwd=REPO, env=environment, capture_output=True, text=True, timeout=1800)
    if done.returncode != 0:
        raise RuntimeError(f"the quick start ended with exit code {done.returncode}:\n{done.stdout}\n{done.stderr}")
    return run_dir


def read_rows(run_dir: Path) -> list[dict]:
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
