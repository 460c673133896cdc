"""When periodic actions fall, and which of several trainer failures is told."""

import asyncio

import pytest

from miles.ray.cluster import is_due
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
