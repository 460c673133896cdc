"""When periodic actions fall, which of several trainer failures is told, and what a step logs."""

import asyncio
from collections import Counter
from types import SimpleNamespace

import pytest

from miles.ray.cluster import Cluster
from miles.ray.intervals import Intervals
from miles.ray.memory_turns import MemoryTurns
from miles.ray.rollout_manager import RolloutBatch
from miles.ray.train_group import TrainerDied, _root_cause


def due(num_rollout=10, rollouts_per_epoch=None, **args) -> Intervals:
    defaults = dict(save="here", save_hf=None, save_trigger_sentinel=None, save_interval=None, eval_interval=None)
    defaults |= dict(skip_eval_before_train=False, update_weights_interval=1, num_epoch=None)
    return Intervals(SimpleNamespace(**defaults | args), 2, num_rollout, rollouts_per_epoch)


def test_interval_counts_finished_rollouts():
    assert [r for r in range(10) if due(eval_interval=4).evaluate(r)] == [3, 7]
    assert [r for r in range(10) if due(update_weights_interval=4).update(r)] == [3, 7]


def test_the_last_rollout_is_saved():
    assert [r for r in range(6) if due(6, save_interval=4).save(r)] == [3, 5]


def test_epoch_ends_are_due():
    assert [r for r in range(6) if due(6, 3, num_epoch=2, eval_interval=100).evaluate(r)] == [2, 5]
    assert [r for r in range(6) if due(6, 3, num_epoch=None, eval_interval=100).evaluate(r)] == []


def test_without_an_interval_nothing_is_due():
    never = due(6, 2, num_epoch=3)
    assert not any(never.save(r) or never.evaluate(r) or never.evaluate_before_train(r) for r in range(6))


def test_nothing_is_saved_where_there_is_no_folder():
    assert not any(due(6, save=None, save_interval=1).save(r) for r in range(6))


def test_the_first_evaluation_precedes_the_first_step_of_this_process():
    assert [r for r in range(6) if due(eval_interval=3).evaluate_before_train(r)] == [2]
    assert not any(due(eval_interval=3, skip_eval_before_train=True).evaluate_before_train(r) for r in range(6))


def test_the_rank_that_failed_by_itself_is_told_not_its_peers():
    peer = TrainerDied("trainer rank 0 failed in train: RuntimeError: [gloo] Connection closed by peer")
    own = TrainerDied("trainer rank 1 failed in train: ValueError: loss is not finite")
    assert _root_cause([peer, None, own]) is own
    assert _root_cause([peer]) is peer
    with pytest.raises(asyncio.CancelledError):
        raise _root_cause([])


class Trainer:
    """Two optimizer steps a batch; measures the reward of the batch once more."""

    async def train(self, batch, values=None):
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
    cluster._turns = MemoryTurns(cluster.args, None, None, cluster._while_trainer_lives, cluster._timed)
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
