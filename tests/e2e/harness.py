"""Runs a driver as its user would, as a process of its own, and reads what it left behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

REPO = Path(__file__).resolve().parents[2]


@dataclass
class Finished:
    returncode: int
    output: str
    run_dir: Path

    @property
    def rows(self) -> list[dict]:
        path = self.run_dir / "metrics.jsonl"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    def series(self, key: str) -> dict[int, float]:
        """Values of one metric by step."""
        return {row["step"]: row[key] for row in self.rows if key in row}

    def reproducible_rows(self) -> list[dict]:
        """Everything that must be the same, bit for bit, in an equal run: all but wall-clock.

        A resumed run has a first weight update of its own, whose row holds nothing but seconds: rows without a value are left out.
        """
        kept = [{k: v for k, v in row.items() if k != "_time" and not k.startswith("perf/")} for row in self.rows]
        return [row for row in kept if row.keys() - {"step", "step_key"}]

    def check(self) -> Finished:
        if self.returncode != 0:
            logs = "\n".join(f"--- {p.name}\n{p.read_text()[-3000:]}" for p in (self.run_dir / "logs").glob("*.log"))
            raise AssertionError(f"exit code {self.returncode}\n{self.output[-6000:]}\n{logs}")
        return self


class Run:
    """A driver process; `with` ends it and everything it started."""

    def __init__(self, argv: list[str], run_dir: Path, driver: str = "train.py", env: dict[str, str] | None = None):
        self.run_dir = run_dir
        run_dir.mkdir(parents=True, exist_ok=True)
        self._out = run_dir.with_suffix(".out")
        mark = {"MILES_TEST_RUN": str(run_dir)}  # every process of the run inherits it: see processes_of
        path = os.pathsep.join(filter(None, (str(REPO), os.environ.get("PYTHONPATH"))))
        environment = os.environ | {"PYTHONPATH": path, "PYTHONUNBUFFERED": "1"} | mark | (env or {})
        with open(self._out, "wb") as out:
            self.process = subprocess.Popen(
                [sys.executable, str(REPO / driver), *argv, "--run-dir", str(run_dir)],
                cwd=REPO,
                stdout=out,
                stderr=subprocess.STDOUT,
                env=environment,
            )

    def __enter__(self) -> Run:
        return self

    def __exit__(self, *exc: object) -> None:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            try:
                self.process.wait(40)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait(10)

    def wait(self, timeout_s: float = 240) -> Finished:
        try:
            self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self.process.kill()
            raise AssertionError(f"still running after {timeout_s} s:\n{self.output[-6000:]}") from None
        return Finished(self.process.returncode, self.output, self.run_dir)

    @property
    def output(self) -> str:
        return self._out.read_text(errors="replace")

    def wait_for(self, condition, timeout_s: float = 120, what: str = "the condition"):
        """Poll `condition()` until it returns something true; the run must not end before."""
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            found = condition()
            if found:
                return found
            if self.process.poll() is not None:
                raise AssertionError(f"the run ended before {what}:\n{self.output[-6000:]}")
            time.sleep(0.05)
        raise AssertionError(f"{what} did not come within {timeout_s} s:\n{self.output[-6000:]}")

    def wait_for_step(self, step: int, key: str = "train/loss", timeout_s: float = 180) -> None:
        live = Finished(0, "", self.run_dir)
        self.wait_for(lambda: step in live.series(key), timeout_s, f"{key} of step {step}")


def processes_of(run_dir: Path) -> list[tuple[int, str]]:
    """Live processes that a run started, as (pid, command line): those that inherited its mark or write to its logs."""
    found = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit() or int(entry.name) == os.getpid():
            continue
        try:
            state = (entry / "stat").read_text().rsplit(")", 1)[1].split()[0]
            marked = f"MILES_TEST_RUN={run_dir}\0".encode() in (entry / "environ").read_bytes()
            writes = str(os.readlink(entry / "fd/1")).startswith(f"{run_dir}/logs/")
            command = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
        except (OSError, IndexError):
            continue
        if state != "Z" and (marked or writes):
            found.append((int(entry.name), command))
    return found
