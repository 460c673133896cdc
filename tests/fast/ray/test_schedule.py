"""When periodic actions fall, which of several trainer failures is told, and what a step logs."""

import asyncio
from collections import Counter
from types import SimpleNamespace

import pytest

from miles.ray.cluster import Cluster, is_due
from miles.ray.rollout_manager import RolloutBatch
from miles.ray.train_group import TrainerDied, _root_cause


def test_interval_counts_finished_rollouts():
    assert [r for r in range(10) if is_due(r, 4, None, None)] == [3, 7]


def test_the_last_rollout_is_due_when_asked_for():
    assert [r for r in range(6) if is_due(r, 4, None, 5)] == [3, 5]


def test_epoch_ends_are_due():
    assert [r for r in range(6) if is_due(r, 100, 3, None)] == [2, 5]


def test_without_an_interval_nothing_is_due():
    assert not any(is_due(r, None, 2, 5) for r in range(6))


def test_the_rank_that_failed_by_itself_is_told_not_its_peers():
    peer = TrainerDied("trainer rank 0 failed in train: RuntimeError: [gloo] Connection closed by peer")
    own = TrainerDied("trainer rank 1 failed in train: ValueError: loss is not finite")
    assert _root_cause([peer, None, own]) is own
    assert _root_cause([peer]) is peer
    with pytest.raises(asyncio.CancelledError):
        raise _root_cause([])


class Trainer:
    """Two optimizer steps a batch; measures the reward of the batch once more."""

    async def train(self, batch):
        own = {"rollout/raw_reward": 0.5, "rollout/advantages": 0.0, "contract/token_exact_ratio": 1.0}
        return [{"train/loss": 1.0, **own}, {"train/loss": 0.5}]


async def test_a_step_logs_each_metric_once_on_the_axis_where_it_belongs():
    cluster = Cluster(
        SimpleNamespace(num_rollout=3, debug_rollout_only=False, offload_train=False, offload_rollout=False)
    )
    rows = []
    cluster.tracker = SimpleNamespace(log=lambda metrics, step_key, step: rows.append((step_key, step, dict(metrics))))
    cluster.progress = SimpleNamespace(phase=lambda name: None, step=lambda *a: None, begin=lambda *a: None)
    cluster.args.debug_exit_after_rollout = None
    cluster.trainer, cluster.start_rollout_id = Trainer(), 2
    for step in cluster.steps():
        await cluster.train(step, RolloutBatch(step, [], [], {"rollout/raw_reward": 0.5}))
        with cluster._timed("update_weights"):
            cluster._log({"perf/update_weights_time": 0.25}, "rollout/step", step)
    points = Counter((axis, step, name) for axis, step, metrics in rows for name in metrics)
    assert max(points.values()) == 1, points
    assert {(axis, step) for axis, step, name in points if name == "train/loss"} == {
        ("train/step", 4),
        ("train/step", 5),
    }
    on_rollout = {name for axis, step, name in points if (axis, step) == ("rollout/step", 2)}
    assert on_rollout >= {"rollout/raw_reward", "rollout/advantages", "perf/train_time", "perf/update_weights_time"}
