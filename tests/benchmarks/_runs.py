"""Runs of the drivers for benchmarks: started as a user would, watched while they run, read when they are done."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

REPO = Path(__file__).resolve().parents[2]


class Failed(RuntimeError):
    """A run ended with an error; the message has its output and the ends of its logs."""


def run_driver(run_dir: Path, flags: list[str], driver: str = "train.py", timeout_s: float = 1800) -> float:
    """Run `driver` with `flags` and `--run-dir`. Returns when it was launched, as `time.time()`. Raises: Failed."""
    run_dir.mkdir(parents=True, exist_ok=True)
    path = os.pathsep.join(filter(None, (str(REPO), os.environ.get("PYTHONPATH"))))
    environment = os.environ | {"PYTHONPATH": path}
    command = [sys.executable, str(REPO / driver), *map(str, flags), "--run-dir", str(run_dir)]
    launched = time.time()
    with open(run_dir / "driver.out", "wb") as out:
        try:
            done = subprocess.run(
                command, cwd=REPO, env=environment, stdout=out, stderr=subprocess.STDOUT, timeout=timeout_s
            )
            code: int | str = done.returncode
        except subprocess.TimeoutExpired:
            code = f"none within {timeout_s:g} s"
    if code != 0:
        logs = [run_dir / "driver.out", *sorted((run_dir / "logs").glob("*.log"))]
        tails = "\n".join(f"--- {p.name}\n{p.read_text(errors='replace')[-3000:]}" for p in logs)
        raise Failed(f"{run_dir.name}: exit code {code}\n{tails}")
    return launched


@contextlib.contextmanager
def gpu_memory() -> Iterator[list[tuple[float, float]]]:
    """A list of (`time.time()`, GiB in use on GPU 0) that grows while the block runs; empty without nvidia-smi."""
    samples: list[tuple[float, float]] = []
    query = ["nvidia-smi", "--id=0", "--query-gpu=memory.used", "--format=csv,noheader,nounits", "--loop-ms=100"]
    try:
        process = subprocess.Popen(query, stdout=subprocess.PIPE, text=True)
    except FileNotFoundError:
        yield samples
        return

    def read() -> None:
        assert process.stdout is not None
        for line in process.stdout:
            with contextlib.suppress(ValueError):
                samples.append((time.time(), float(line) / 1024))

    reader = threading.Thread(target=read, daemon=True)
    reader.start()
    try:
        yield samples
    finally:
        process.terminate()
        process.wait(10)
        reader.join(5)
