"""The run's record: what is written, what a resumed run keeps of it, and what a failing sink may do."""

import errno
import json
import logging
import math
import os
from pathlib import Path

import numpy as np
import pytest
import torch

from miles.tracking.sinks.base import Sink, SinkError
from miles.tracking.sinks.jsonl import read_rows
from miles.tracking.tracker import Tracker


def lines(args):
    return Path(args.run_dir, "metrics.jsonl").read_text().splitlines()


def written(args):
    return list(read_rows(Path(args.run_dir, "metrics.jsonl")))


def test_a_row_is_one_line_of_valid_json_with_sorted_keys(args):
    tracker = Tracker(args)
    tracker.log({"train/z": 1.5, "train/a": 2, "train/flag": True}, step_key="train/step", step=3)
    (line,) = lines(args)  # there before the tracker closes
    row = json.loads(line)
    assert list(row) == sorted(row)
    assert row.pop("_time") > 1.7e9
    assert row == {"step_key": "train/step", "step": 3, "train/a": 2, "train/z": 1.5, "train/flag": True}


def test_numbers_that_json_lacks_are_strings_and_come_back_as_numbers(args):
    metrics = {"train/nan": math.nan, "train/inf": math.inf, "train/low": -np.inf, "train/t": torch.tensor(math.nan)}
    Tracker(args).log(metrics, step_key="train/step", step=0)

    def forbidden(name):
        raise AssertionError(f"{name} is not JSON")

    row = json.loads(lines(args)[0], parse_constant=forbidden)
    assert [row[f"train/{k}"] for k in ("nan", "inf", "low", "t")] == ["NaN", "Infinity", "-Infinity", "NaN"]
    (back,) = written(args)
    assert math.isnan(back["train/nan"]) and back["train/inf"] == math.inf and back["train/low"] == -math.inf


def test_scalars_of_numpy_and_torch_are_numbers(args):
    metrics = {
        "train/a": np.float32(0.5),
        "train/b": np.int64(2),
        "train/c": torch.tensor(3.0),
        "train/d": np.array(1.0),
    }
    Tracker(args).log(metrics, step_key="train/step", step=np.int64(1))
    row = json.loads(lines(args)[0])
    assert (row["train/a"], row["train/b"], row["train/c"], row["train/d"], row["step"]) == (0.5, 2, 3.0, 1.0, 1)


def test_a_wrong_axis_is_refused_and_nothing_is_no_row(args):
    tracker = Tracker(args)
    with pytest.raises(ValueError, match="'step' is none of rollout/step, train/step, eval/step"):
        tracker.log({"a": 1}, step_key="step", step=0)
    tracker.log({}, step_key="train/step", step=0)
    assert lines(args) == []


# ---- resume ----------------------------------------------------------------------------------------------------------


def log_steps(tracker, rollouts, train_steps=1, offset=0.0):
    for r in rollouts:
        tracker.log({"rollout/raw_reward": r + offset}, step_key="rollout/step", step=r)
        for i in range(train_steps):
            tracker.log({"train/loss": r + offset}, step_key="train/step", step=r * train_steps + i)
        tracker.log({"perf/step_time": 1.0}, step_key="rollout/step", step=r)
        tracker.log({"eval/words": r + offset}, step_key="eval/step", step=tracker.compute_rollout_step(r))


def without_time(rows):
    return [{k: v for k, v in row.items() if k != "_time"} for row in rows]


@pytest.mark.parametrize("batch, train_steps", [(4, 1), (2, 2)])
@pytest.mark.parametrize("train_axis", [False, True])
def test_a_resumed_run_has_the_rows_of_an_uninterrupted_one(args, tmp_path, batch, train_steps, train_axis):
    args.global_batch_size, args.wandb_always_use_train_step = batch, train_axis
    whole = Tracker(args)
    log_steps(whole, range(4), train_steps)
    whole.close()
    expected = written(args)

    args.run_dir = str(tmp_path / "interrupted")
    first = Tracker(args)
    log_steps(first, range(3), train_steps)  # the checkpoint is of rollout 1; rollout 2 is lost
    state = first.state_dict()
    first.close()
    with open(Path(args.run_dir, "metrics.jsonl"), "a") as f:
        f.write('{"train/loss": 0.')  # killed in the middle of a row
    args.load = "checkpoints"
    second = Tracker(args)
    second.load_state_dict(state, resumed_at=2)
    log_steps(second, range(2, 4), train_steps)
    second.close()
    assert without_time(written(args)) == without_time(expected)


def test_a_new_run_in_an_old_folder_moves_the_old_rows_aside(args):
    for value in (1, 2, 3):
        tracker = Tracker(args)
        tracker.log({"train/loss": value}, step_key="train/step", step=0)
        tracker.close()
    assert [row["train/loss"] for row in written(args)] == [3]
    kept = sorted(p.name for p in Path(args.run_dir).glob("metrics.*.jsonl"))
    assert kept == ["metrics.1.jsonl", "metrics.2.jsonl"]


def test_a_damaged_record_is_not_thrown_away(args):
    tracker = Tracker(args)
    log_steps(tracker, range(2))
    tracker.close()
    path = Path(args.run_dir, "metrics.jsonl")
    path.write_text(path.read_text().replace("}\n", "\n", 1))
    args.load = "checkpoints"
    with pytest.raises(ValueError, match="line 1 is not JSON"):
        Tracker(args).load_state_dict({}, resumed_at=1)
    assert len(lines(args)) == 8


def test_state_comes_before_rows(args):
    tracker = Tracker(args)
    with pytest.raises(RuntimeError, match="--load"):
        tracker.load_state_dict({}, resumed_at=1)


# ---- failing sinks ---------------------------------------------------------------------------------------------------


class Broken(Sink):
    name = "broken"

    def open(self, state, resumed_at):
        pass

    def log(self, metrics, step_key, step, time_s):
        raise ConnectionError("the server is gone")


def test_a_failing_sink_is_told_once_counted_and_stops_nothing(args, caplog):
    tracker = Tracker(args)
    tracker.sinks.insert(0, Broken())
    with caplog.at_level(logging.ERROR):
        for step in range(3):
            tracker.log({"train/loss": 1.0}, step_key="train/step", step=step)
    assert len(caplog.records) == 1 and "the server is gone" in caplog.text
    assert [row.get("tracking/broken_errors") for row in written(args)] == [None, 1, 2]
    tracker.close()
    tracker.close()
    assert len(caplog.records) == 2 and "failed 3 times" in caplog.records[1].getMessage()


def test_a_full_disk_leaves_whole_rows_and_they_all_come_when_there_is_room(args, caplog, monkeypatch):
    tracker = Tracker(args)
    sink = tracker.sinks[0]
    tracker.log({"train/loss": 0.0}, step_key="train/step", step=0)

    class Full:
        """Takes ten bytes, then the disk is full."""

        def __init__(self, file):
            self.file, self.room = file, 10

        def write(self, data):
            if not self.room:
                raise OSError(errno.ENOSPC, "No space left on device")
            taken, self.room = self.file.write(data[: self.room]), 0
            return taken

        def fileno(self):
            return self.file.fileno()

    file, sink._file = sink._file, Full(sink._file)
    tracker.log({"train/loss": 1.0}, step_key="train/step", step=1)
    assert "No space left" in caplog.text
    assert len(written(args)) == 1 and lines(args)[0].endswith("}")
    sink._file = file
    tracker.log({"train/loss": 2.0}, step_key="train/step", step=2)
    assert [row["train/loss"] for row in written(args)] == [0, 1, 2]


@pytest.mark.skipif(os.geteuid() == 0 and not Path("/proc/self").exists(), reason="needs a folder nobody can write")
def test_a_run_folder_that_cannot_be_written_ends_the_run_at_once(args):
    args.run_dir = "/proc/self/nothing"
    with pytest.raises(SinkError, match="--run-dir"):
        Tracker(args)


# ---- axes ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "flags, step",
    [
        ({}, 5),
        ({"wandb_always_use_train_step": True, "global_batch_size": 2}, 10),
        ({"wandb_always_use_train_step": True, "global_batch_size": 4}, 5),
        ({"wandb_always_use_train_step": True, "use_dynamic_global_batch_size": True}, 5),
    ],
)
def test_the_step_of_a_rollout(args, flags, step):
    vars(args).update(flags)
    assert Tracker(args).compute_rollout_step(5) == step
