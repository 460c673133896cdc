"""Bundles, their order, and what a run that does not fit is told."""

from types import SimpleNamespace

import pytest

from miles.ray import placement
from miles.ray.placement import Demand, PlacementError, demand_of, wait_for_resources


def make(**changes):
    base = dict(
        actor_num_nodes=2,
        actor_num_gpus_per_node=4,
        rollout_num_gpus=6,
        eval_num_gpus=0,
        rollout_external=False,
        colocate=False,
        train_device="cuda",
        debug_rollout_only=False,
        debug_train_only=False,
        gpus_per_rank=1.0,
    )
    return SimpleNamespace(**base | changes)


@pytest.mark.parametrize(
    ("changes", "bundles", "offset"),
    [
        ({}, 14, 8),
        ({"colocate": True, "rollout_num_gpus": 8}, 8, 0),
        ({"debug_train_only": True}, 8, 8),
        ({"debug_rollout_only": True}, 6, 0),
        ({"eval_num_gpus": 2}, 16, 8),
        ({"rollout_external": True}, 8, 8),
    ],
)
def test_demand_follows_the_mode(changes, bundles, offset):
    demand = demand_of(make(**changes))
    assert (demand.bundles, demand.rollout_offset) == (bundles, offset)


def test_a_run_that_does_not_fit_is_told_need_and_have_at_once(monkeypatch):
    node = {"Alive": True, "Resources": {"CPU": 8.0, "GPU": 4.0}, "NodeManagerAddress": "10.0.0.1"}
    gone = node | {"Alive": False}
    monkeypatch.setattr(placement.ray, "nodes", lambda: [node, gone])
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    demand = Demand(trainer=8, rollout=8, evaluation=0, colocate=False, gpus=True)
    with pytest.raises(PlacementError, match=r"needs 16 GPUs.*has 4 on 1 node\(s\) \(10\.0\.0\.1: 4\)"):
        wait_for_resources(demand, timeout_s=60)


def test_a_cluster_that_is_still_growing_is_waited_for(monkeypatch):
    node = {"Alive": True, "Resources": {"GPU": 4.0}, "NodeManagerAddress": "10.0.0.1"}
    answers = iter([[node], [node, node | {"NodeManagerAddress": "10.0.0.2"}]])
    monkeypatch.setattr(placement.ray, "nodes", lambda: next(answers))
    monkeypatch.setattr(placement.time, "sleep", lambda _: None)
    monkeypatch.setenv("RAY_ADDRESS", "auto")
    wait_for_resources(Demand(trainer=4, rollout=4, evaluation=0, colocate=False, gpus=True), timeout_s=60)


def test_addresses_sort_by_number_not_by_text():
    hosts = ["10.0.0.10", "10.0.0.9", "10.0.0.100"]
    assert sorted(hosts, key=placement._address_key) == ["10.0.0.9", "10.0.0.10", "10.0.0.100"]


def test_a_ray_that_is_too_slow_to_start_is_started_again_and_other_failures_are_not(monkeypatch):
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr(placement.ray, "is_initialized", lambda: False)
    failures = []

    def init(address, **options):
        assert address == "local"
        if failures:
            raise failures.pop(0)

    monkeypatch.setattr(placement.ray, "init", init)
    monkeypatch.setattr(placement.ray, "shutdown", lambda: None)
    demand = Demand(trainer=1, rollout=1, evaluation=0, colocate=False, gpus=False)
    slow = Exception("The current node timed out during startup. This could happen because ...")
    failures[:] = [slow, slow]
    placement.connect_ray(demand)
    failures[:] = [slow, slow, slow]
    with pytest.raises(Exception, match="timed out"):
        placement.connect_ray(demand)
    failures[:] = [ValueError("no space left")]
    with pytest.raises(ValueError, match="no space left"):
        placement.connect_ray(demand)
