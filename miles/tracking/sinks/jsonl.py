"""`metrics.jsonl` in the run folder: one JSON object a row, always written, the record that everything else is drawn from.

    {"_time": 1764600000.1, "rollout/raw_reward": 0.5, "step": 3, "step_key": "rollout/step"}

Keys are sorted; NaN and infinities are the strings "NaN", "Infinity" and "-Infinity", so that every row is valid JSON.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

from miles.tracking.sinks.base import Sink, SinkError
from miles.tracking.steps import EVAL, ROLLOUT, TRAIN, compute_rollout_step
from miles.utils.atomic_io import write_atomic

FILE_NAME = "metrics.jsonl"
_HELD_ROWS = 100_000  # rows kept in memory while the disk is full


class JsonlSink(Sink):
    name = "metrics.jsonl"

    def __init__(self, args: Any) -> None:
        self.args = args
        self.path = Path(args.run_dir) / FILE_NAME
        self._file: BinaryIO | None = None
        self._held: list[bytes] = []

    def open(self, state: dict[str, Any], resumed_at: int | None) -> None:
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            if self.path.exists() and self.path.stat().st_size:
                if resumed_at:
                    self._cut(resumed_at)
                else:
                    self.path.rename(_free_name(self.path))
            self._file = open(self.path, "ab", buffering=0)  # noqa: SIM115 - open until close()
        except OSError as error:
            raise SinkError(f"cannot write {self.path} (--run-dir): {error}") from error

    def _cut(self, resumed_at: int) -> None:
        """Drop the rows that the resumed run writes again, and a row that a crash left unfinished."""
        kept = rows_before(self.args, read_rows(self.path), resumed_at)
        write_atomic(self.path, b"".join(encode(row) for row in kept))

    def log(self, metrics: dict[str, Any], step_key: str, step: int, time_s: float) -> None:
        if self._file is None:
            raise SinkError(f"{self.path} is not open")
        self._held.append(encode({**metrics, "step_key": step_key, "step": step, "_time": time_s}))
        del self._held[:-_HELD_ROWS]
        while self._held:
            self._write(self._held[0])
            self._held.pop(0)

    def _write(self, line: bytes) -> None:
        """Append a line, wholly or, when the disk fills up in the middle, not at all."""
        assert self._file is not None
        end = os.fstat(self._file.fileno()).st_size
        try:
            written = 0
            while written < len(line):
                written += self._file.write(line[written:])
        except OSError:
            os.truncate(self.path, end)
            raise

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None


def _free_name(path: Path) -> Path:
    """A name for the file of an earlier run in the same folder."""
    number = 1
    while (moved := path.with_suffix(f".{number}.jsonl")).exists():
        number += 1
    return moved


# ---- rows ------------------------------------------------------------------------------------------------------------


def encode(row: dict[str, Any]) -> bytes:
    plain = {key: _plain(value) for key, value in row.items()}
    return json.dumps(plain, sort_keys=True, allow_nan=False, separators=(", ", ": ")).encode() + b"\n"


def _plain(value: Any) -> Any:
    """A JSON value; a number that JSON lacks becomes its name."""
    if hasattr(value, "item") and getattr(value, "ndim", 0) == 0:
        value = value.item()
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    if isinstance(value, dict):
        return {str(k): _plain(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(v) for v in value]
    return value if isinstance(value, bool | int | float | str) or value is None else str(value)


def read_rows(path: Path) -> Iterator[dict[str, Any]]:
    """Rows of a metrics file, non-finite numbers as floats again. A last line that is not whole ends it."""
    with open(path, "rb") as f:
        for number, line in enumerate(f, start=1):
            try:
                row = json.loads(line)
            except ValueError as error:
                if not line.endswith(b"\n"):
                    return
                raise ValueError(f"{path} line {number} is not JSON: {error}") from error
            for key, value in row.items():
                if key not in ("step_key", "step") and value in ("NaN", "Infinity", "-Infinity"):
                    row[key] = float(value)
            yield row


def rows_before(args: Any, rows: Iterator[dict[str, Any]], rollout_id: int) -> Iterator[dict[str, Any]]:
    """The rows that belong to rollouts before `rollout_id`. A training row belongs to the rollout row before it."""
    current = -1
    for row in rows:
        step = row["step"]
        if row["step_key"] == ROLLOUT:
            current = step
        before = {
            ROLLOUT: step < rollout_id,
            TRAIN: current < rollout_id,
            EVAL: step < compute_rollout_step(args, rollout_id),
        }
        if before.get(row["step_key"], True):
            yield row
