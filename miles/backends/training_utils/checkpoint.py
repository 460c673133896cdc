"""Checkpoints that are there whole or not at all.

    {save}/iter_0000007/                       written as .iter_0000007.tmp, flushed, renamed
        manifest.json                          every file below and its size, written last before the rename
        driver.json                            what is not the model: weight version, tracker ids
        ...                                    the backend's files
    {save}/latest_checkpointed_iteration.txt   the tracker: replaced after the rename; only then the checkpoint counts

A process that dies anywhere in between leaves the previous checkpoint as the latest.
"""

from __future__ import annotations

import contextlib
import errno
import json
import logging
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from miles.utils.atomic_io import publish_dir, write_atomic

logger = logging.getLogger(__name__)

TRACKER = "latest_checkpointed_iteration.txt"
MANIFEST = "manifest.json"
DRIVER_STATE = "driver.json"
_ITERATION = re.compile(r"iter_(\d{7,})")


class CheckpointError(RuntimeError):
    """A checkpoint that cannot be written or used; the message says what is wrong with it and what to do."""


class CheckpointStore:
    """The checkpoints of one `--save` or `--load` directory. One process writes; any number may read."""

    def __init__(self, save_dir: str | Path) -> None:
        self.root = Path(save_dir)

    # ---- writing -------------------------------------------------------------------------------------------------

    def begin(self, rollout_id: int) -> Path:
        """An empty folder to write checkpoint `rollout_id` into. Left-overs of a save that died are removed."""
        temporary = self._temporary(rollout_id)
        with _disk_errors(temporary):
            for stale in self.root.glob(".iter_*.tmp"):
                shutil.rmtree(stale)
            temporary.mkdir(parents=True)
        return temporary

    def commit(self, rollout_id: int, driver_state: dict[str, Any] | None = None) -> Path:
        """Publish what was written since `begin`: flush, rename, then point the tracker at it. Returns its folder."""
        temporary, final = self._temporary(rollout_id), self.path(rollout_id)
        if not temporary.is_dir():
            raise CheckpointError(f"checkpoint {rollout_id} was not begun in {self.root}")
        with _disk_errors(temporary):
            state = {"rollout_id": rollout_id, **(driver_state or {})}
            (temporary / DRIVER_STATE).write_text(json.dumps(state, indent=2))
            (temporary / MANIFEST).write_text(json.dumps(_sizes(temporary), indent=2))
            publish_dir(temporary, final)
            write_atomic(self.root / TRACKER, f"{rollout_id}\n")
        return final

    def discard(self, rollout_id: int) -> None:
        """Remove what was written since `begin`; for a save that failed."""
        shutil.rmtree(self._temporary(rollout_id), ignore_errors=True)

    # ---- reading -------------------------------------------------------------------------------------------------

    def path(self, rollout_id: int) -> Path:
        return self.root / f"iter_{rollout_id:07d}"

    def latest(self) -> int | None:
        """The id that the tracker names; None where no checkpoint was ever completed.

        Raises: CheckpointError when the tracker is unreadable, or lost beside several checkpoints.
        """
        tracker = self.root / TRACKER
        if tracker.is_file():
            text = tracker.read_text().strip()
            if not text.isdigit():
                raise CheckpointError(
                    f"{tracker} says {text[:40]!r}, not a number. Write the id of one of {self.iterations()} into it."
                )
            return int(text)
        found = self.iterations()
        if len(found) > 1:
            raise CheckpointError(
                f"{self.root} has checkpoints {found} but no {TRACKER}. Choose one with --ckpt-step, or write its id there."
            )
        if found:  # the very first save died between its rename and its tracker
            logger.warning(
                "%s: checkpoint %d was never completed and is not used; --ckpt-step %d loads it", self.root, *found * 2
            )
        return None

    def iterations(self) -> list[int]:
        """Ids of all checkpoint folders, complete or not, ascending."""
        names = [path.name for path in self.root.glob("iter_*")] if self.root.is_dir() else []
        return sorted(int(match[1]) for name in names if (match := _ITERATION.fullmatch(name)))

    def verify(self, rollout_id: int) -> Path:
        """The folder of a checkpoint all of whose files are there in full size.

        Raises: CheckpointError listing what is missing, and the ids that exist.
        """
        path = self.path(rollout_id)
        replaced = path.with_name(f".{path.name}.replaced")
        if not path.is_dir() and replaced.is_dir():
            replaced.rename(path)  # a save of the same id died after it had moved the older one aside
        if not path.is_dir():
            raise CheckpointError(f"no checkpoint {rollout_id} in {self.root}; it has {self.iterations() or 'none'}")
        try:
            expected = json.loads((path / MANIFEST).read_text())
        except (OSError, ValueError) as error:
            raise CheckpointError(f"{path} has no readable {MANIFEST}, so it is not complete: {error}") from error
        actual = _sizes(path)
        wrong = [f"{name} is missing" for name in sorted(expected.keys() - actual.keys())]
        wrong += [
            f"{name} has {actual[name]} bytes instead of {size}"
            for name, size in expected.items()
            if name in actual and actual[name] != size
        ]
        if wrong:
            others = [i for i in self.iterations() if i != rollout_id]
            raise CheckpointError(f"{path} is damaged: {'; '.join(wrong[:10])}. Other checkpoints there: {others}")
        return path

    def read_driver_state(self, rollout_id: int) -> dict[str, Any]:
        """What `commit` was given, and the rollout id."""
        file = self.verify(rollout_id) / DRIVER_STATE
        state = json.loads(file.read_text())
        if state.get("rollout_id") != rollout_id:
            raise CheckpointError(f"{file} belongs to rollout {state.get('rollout_id')}, not {rollout_id}")
        return state

    def _temporary(self, rollout_id: int) -> Path:
        return self.root / f".iter_{rollout_id:07d}.tmp"


def resolve_load(load: str | Path | None, ckpt_step: int | None = None) -> tuple[CheckpointStore, int] | None:
    """The checkpoint that `--load` and `--ckpt-step` name, verified; None where there is nothing to resume from.

    `load` is a directory with a tracker, or one `iter_NNNNNNN` folder of it. A directory without checkpoints, or none at
    all, is a fresh run's: many launch commands load from where they save.
    """
    if load is None:
        return None
    path = Path(load)
    match = _ITERATION.fullmatch(path.name)
    if match is not None and path.is_dir():
        store, step = CheckpointStore(path.parent), int(match[1])
        if ckpt_step is not None and ckpt_step != step:
            raise CheckpointError(
                f"--load {load} is checkpoint {step}, --ckpt-step asks for {ckpt_step}: drop one of them"
            )
    else:
        store = CheckpointStore(path)
        found = store.latest() if ckpt_step is None else ckpt_step
        if found is None:
            return None
        step = found
    store.verify(step)
    return store, step


def read_resume_state(load: str | Path | None, ckpt_step: int | None = None) -> dict[str, Any] | None:
    """The driver state of the checkpoint that `resolve_load` finds; None for a fresh run."""
    found = resolve_load(load, ckpt_step)
    return None if found is None else found[0].read_driver_state(found[1])


def _sizes(directory: Path) -> dict[str, int]:
    """Bytes of every file below a checkpoint, by relative path; the manifest itself aside."""
    files = sorted(path for path in directory.rglob("*") if path.is_file())
    return {str(p.relative_to(directory)): p.stat().st_size for p in files if p.name != MANIFEST}


@contextlib.contextmanager
def _disk_errors(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise disk_error(error, path) from error


def disk_error(error: OSError, path: Path) -> CheckpointError:
    """An OSError while writing below `path`, as a message that says how much room there is."""
    room = ""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        existing = next(p for p in (path, *path.parents) if p.exists())
        room = f"; {shutil.disk_usage(existing).free / 1e9:.2f} GB are free there: make room, or point --save elsewhere"
    return CheckpointError(f"writing {path} failed: {error}{room}. Earlier checkpoints are untouched.")
