"""A node whose Ray does not start."""

from __future__ import annotations

import sys

import pytest

from miles.launch import node as node_module
from miles.launch.node import RayNode
from miles.launch.options import LaunchError, parse


@pytest.mark.parametrize("rank", ["0", "1"])
def test_ray_that_does_not_start_is_tried_again_and_told_with_its_last_words(monkeypatch, tmp_path, rank):
    """The interpreter that would run `ray start` is one that only complains, and counts."""
    ray = tmp_path / "python"
    ray.write_text(f"#!/bin/sh\necho \"$@\" >> {tmp_path}/calls\necho 'no space left on device'\nexit 1\n")
    ray.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(ray))
    monkeypatch.setattr(node_module, "wait_for_port", lambda address, timeout_s: None)
    options = parse(["--num-nodes", "2", "--node-rank", rank, "--head", "127.0.0.1", "--port", "39871"])
    with pytest.raises(
        LaunchError, match=r"ended before it was part of a cluster. Its last lines:\nno space left on device"
    ):
        RayNode(options, {}).__enter__()
    calls = (tmp_path / "calls").read_text().splitlines()
    assert len(calls) == 3 and all("--node-ip-address=127.0.0.1" in call for call in calls)
    assert ("--head --port=39871" in calls[0]) == (rank == "0")
    assert ("--address=127.0.0.1:39871" in calls[0]) == (rank == "1")
