"""wandb and TensorBoard, read back from what they wrote."""

import json
import math
import struct
from pathlib import Path

import pytest

from miles.tracking.sinks.base import SinkError
from miles.tracking.sinks.wandb_sink import WandbSink, public_config
from miles.tracking.tracker import Tracker

tensorboard = pytest.importorskip("tensorboard")
wandb = pytest.importorskip("wandb")


def read_tensorboard(folder):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder))
    events.Reload()
    return {tag: [(e.step, e.value) for e in events.Scalars(tag)] for tag in events.Tags()["scalars"]}


def test_tensorboard_has_every_number_at_its_step(args):
    args.use_tensorboard = True
    tracker = Tracker(args)
    tracker.log({"rollout/raw_reward": 0.5}, step_key="rollout/step", step=2)
    tracker.log({"train/loss": math.nan}, step_key="train/step", step=4)
    tracker.log({"eval/words": 0.25}, step_key="eval/step", step=1)  # late: of an earlier step
    tracker.close()
    found = read_tensorboard(Path(args.run_dir, "tensorboard"))
    assert found["rollout/raw_reward"] == [(2, 0.5)] and found["eval/words"] == [(1, 0.25)]
    assert math.isnan(found["train/loss"][0][1])


def test_tensorboard_folders_follow_the_flags(args, tmp_path):
    args.use_tensorboard = True
    args.tensorboard_dir, args.tb_project_name = str(tmp_path / "tb"), "words"
    tracker = Tracker(args)
    tracker.log({"train/loss": 1.0}, step_key="train/step", step=0)
    tracker.close()
    assert list((tmp_path / "tb" / "words" / "run").glob("events*"))


def read_wandb(file):
    """The records of an offline run: protocol buffers in a LevelDB log, of 32 KiB blocks, after a header of 7 bytes."""
    from wandb.proto.wandb_internal_pb2 import Record

    data, at, whole, found = file.read_bytes(), 7, b"", []
    while at + 7 <= len(data):
        room = 32768 - at % 32768
        if room < 7:  # no chunk begins in the last bytes of a block
            at += room
            continue
        size, kind = struct.unpack_from("<HB", data, at + 4)
        whole, at = whole + data[at + 7 : at + 7 + size], at + 7 + size
        if kind in (1, 4):  # a whole record, or the last chunk of one
            found.append(Record.FromString(whole))
            whole = b""
    return found


def item_name(item):
    return item.key or "/".join(item.nested_key)


class FakeRun:
    """Notes what a wandb run is told."""

    id, name, group, dir = "abc123", "run_x", "", "there"

    def __init__(self):
        self.defined, self.rows, self.finished = {}, [], False

    def define_metric(self, name, step_metric=None, hidden=None):
        self.defined[name] = step_metric

    def log(self, row):
        self.rows.append(row)

    def finish(self):
        self.finished = True


@pytest.fixture
def fake_wandb(args, monkeypatch):
    args.use_wandb, args.wandb_mode = True, "offline"
    run, calls = FakeRun(), []
    monkeypatch.setattr(wandb, "init", lambda **kw: calls.append(kw) or run)
    return run, calls


def test_wandb_draws_each_family_over_its_axis_and_keeps_late_evaluations(args, fake_wandb):
    run, _ = fake_wandb
    args.global_batch_size, args.wandb_always_use_train_step = 2, True
    tracker = Tracker(args)
    assert run.defined["*"] == "rollout/step"
    assert run.defined["train/*"] == "train/step" and run.defined["eval/*"] == "eval/step"
    tracker.log({"rollout/raw_reward": 1.0}, step_key="rollout/step", step=7)
    tracker.log({"eval/words": 0.5}, step_key="eval/step", step=6)
    assert run.rows == [{"rollout/raw_reward": 1.0, "rollout/step": 14}, {"eval/words": 0.5, "eval/step": 6}]
    tracker.close()
    assert run.finished


def test_cache_hits_have_their_public_name_outside_the_reproducible_record(args, fake_wandb):
    run, _ = fake_wandb
    tracker = Tracker(args)
    tracker.log({"perf/prefix_cache_hit_rate": 0.5}, step_key="rollout/step", step=0)
    assert run.rows[0]["rollout/prefix_cache_hit_rate"] == 0.5
    assert "rollout/prefix_cache_hit_rate" not in Path(args.run_dir, "metrics.jsonl").read_text()


def test_wandb_takes_its_flags_and_tells_no_secret(args, fake_wandb):
    _, calls = fake_wandb
    vars(args).update(
        wandb_project="p", wandb_team="t", wandb_group="g", wandb_key="topsecret", wandb_random_suffix=False
    )
    Tracker(args).close()
    (given,) = calls
    assert (given["project"], given["entity"], given["group"], given["name"]) == ("p", "t", "g", "g")
    assert given["dir"] == args.run_dir and "id" not in given
    assert "topsecret" not in json.dumps(given["config"]) and given["config"]["rollout_batch_size"] == 2


def test_names_get_a_random_suffix_unless_switched_off(args, fake_wandb):
    _, calls = fake_wandb
    Tracker(args).close()
    Tracker(args).close()
    names = [given["name"] for given in calls]
    assert all(name.startswith("run_") for name in names) and names[0] != names[1]


def test_a_resumed_run_goes_on_in_the_same_wandb_run(args, fake_wandb):
    _, calls = fake_wandb
    first = Tracker(args)
    state = json.loads(json.dumps(first.state_dict()))  # as the checkpoint keeps it
    args.load = "checkpoints"
    second = Tracker(args)
    assert len(calls) == 1, "not opened before the checkpoint said which run it is"
    second.load_state_dict(state, resumed_at=3)
    assert calls[1]["id"] == "abc123" and calls[1]["resume"] == "allow" and calls[1]["name"] == "run_x"


def test_wandb_that_does_not_start_ends_the_run_with_the_way_out(args, monkeypatch):
    args.use_wandb = True

    def refuse(**kw):
        raise wandb.errors.CommError("no network")

    monkeypatch.setattr(wandb, "init", refuse)
    monkeypatch.setenv("WANDB_MODE", "online")
    with pytest.raises(SinkError, match="--wandb-mode offline"):
        Tracker(args)


def test_a_wandb_upload_that_never_ends_does_not_hold_the_run(args, fake_wandb, monkeypatch, caplog):
    import threading

    run, _ = fake_wandb
    monkeypatch.setattr("miles.tracking.sinks.wandb_sink._FINISH_TIMEOUT_S", 0.1)
    monkeypatch.setattr(run, "finish", lambda: threading.Event().wait(30))
    Tracker(args).close()
    assert "wandb sync" in caplog.text


def test_disabled_wandb_is_no_sink(args):
    args.use_wandb, args.wandb_mode = True, "disabled"
    assert not any(isinstance(sink, WandbSink) for sink in Tracker(args).sinks)


def test_offline_wandb_writes_a_run_with_every_name_over_its_axis(args):
    args.use_wandb, args.wandb_mode = True, "offline"
    tracker = Tracker(args)
    tracker.log({"rollout/raw_reward": 0.5, "perf/step_time": 2.0}, step_key="rollout/step", step=3)
    tracker.log({"train/loss": 1.0}, step_key="train/step", step=6)
    tracker.log({"eval/words": 0.25}, step_key="eval/step", step=1)  # late: of an earlier step
    run_id = tracker.state_dict()["wandb"]["run_id"]
    tracker.close()
    assert not tracker.errors
    (file,) = Path(args.run_dir, "wandb").glob("offline-run-*/*.wandb")
    records = read_wandb(file)
    assert {record.run.run_id for record in records if record.HasField("run")} == {run_id}
    axes = {r.metric.glob_name: r.metric.step_metric for r in records if r.HasField("metric") and r.metric.glob_name}
    assert axes == {"*": "rollout/step", "train/*": "train/step", "eval/*": "eval/step"}
    rows = [{item_name(i): json.loads(i.value_json) for i in r.history.item} for r in records if r.HasField("history")]
    wanted = [
        {"rollout/raw_reward": 0.5, "perf/step_time": 2.0, "rollout/step": 3},
        {"train/loss": 1.0, "train/step": 6},
        {"eval/words": 0.25, "eval/step": 1},
    ]
    assert [{k: row.get(k) for k in expected} for row, expected in zip(rows, wanted, strict=True)] == wanted


def test_config_is_plain_values(args):
    args.odd = object()
    assert isinstance(public_config(args)["odd"], str)
    json.dumps(public_config(args))
