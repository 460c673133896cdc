"""The group that trainer and engines share, joined by real processes."""

from __future__ import annotations

import subprocess
import sys
import textwrap
import time

import pytest
import torch
import torch.distributed as dist

from miles.utils.process import reserve_port
from miles.utils.process_group import GroupJoinError, join_group, leave_group

# Joins as SGLang's engines do, without this package: rendezvous by tcp:// url, prefix store, torch's own helper.
SGLANG_PEER = textwrap.dedent(
    """
    import sys, torch, torch.distributed as dist
    from datetime import timedelta
    from torch.distributed import distributed_c10d as c
    port, rank, world = map(int, sys.argv[1:4])
    if "--default-group" in sys.argv:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    store, rank, world = next(c.rendezvous(f"tcp://127.0.0.1:{port}", rank, world, timeout=timedelta(seconds=30)))
    group, _ = c._new_process_group_helper(world, rank, [], c.Backend("gloo"), c.PrefixStore("g", store),
                                           group_name="g", backend_options=None, timeout=timedelta(seconds=30))
    c._world.pg_group_ranks[group] = {i: i for i in range(world)}
    t = torch.zeros(4)
    if "--die" in sys.argv:
        import os
        os._exit(9)
    dist.broadcast(t, src=0, group=group)
    print(t.tolist())
    """
)


def start_peer(port: int, rank: int, world: int, *flags: str) -> subprocess.Popen:
    command = [sys.executable, "-c", SGLANG_PEER, str(port), str(rank), str(world), *flags]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


@pytest.mark.parametrize("default_group", [False, True], ids=["alone", "beside-default-group"])
def test_a_peer_that_joins_as_sglang_does_receives_the_broadcast(default_group):
    listener = reserve_port()
    port = listener.getsockname()[1]
    peers = [start_peer(port, rank, 3, "--default-group") for rank in (1, 2)]
    if default_group:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        group = join_group("127.0.0.1", port, 0, 3, "g", "gloo", 60, listener=listener)
        dist.broadcast(torch.arange(4.0), src=0, group=group)
        assert [peer.communicate(timeout=60)[0].strip() for peer in peers] == ["[0.0, 1.0, 2.0, 3.0]"] * 2
        leave_group(group)
        leave_group(group)  # a second time does nothing
        if default_group:
            dist.all_reduce(torch.ones(1))  # the default group is untouched
    finally:
        for peer in peers:
            peer.kill()
            peer.wait()
        if dist.is_initialized():
            dist.destroy_process_group()


def test_a_missing_peer_is_counted_within_the_deadline():
    listener = reserve_port()
    started = time.monotonic()
    with pytest.raises(GroupJoinError, match=r"2 of 3 ranks did not join within 1 s"):
        join_group("127.0.0.1", listener.getsockname()[1], 0, 3, "g", "gloo", 1, listener=listener)
    assert time.monotonic() - started < 5


def test_a_peer_that_cannot_reach_rank_0_says_so():
    listener = reserve_port()
    port = listener.getsockname()[1]
    listener.close()
    with pytest.raises(GroupJoinError, match=rf"127.0.0.1:{port}: rank 1 could not reach rank 0's store within 1 s"):
        join_group("127.0.0.1", port, 1, 2, "g", "gloo", 1)


def test_a_peer_that_dies_fails_the_broadcast_and_the_name_can_be_used_again():
    for _ in range(2):
        listener = reserve_port()
        port = listener.getsockname()[1]
        peer = start_peer(port, 1, 2, "--die")
        group = join_group("127.0.0.1", port, 0, 2, "g", "gloo", 20, listener=listener)
        assert peer.wait(30) == 9
        with pytest.raises(RuntimeError):
            for _ in range(3):  # the first send may still fit into the socket's buffer
                dist.broadcast(torch.zeros(1 << 20), src=0, group=group)
        leave_group(group, abort=True)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (dict(backend="mpi"), "use 'gloo' or 'nccl'"),
        (dict(group_name=""), "needs a name"),
        (dict(rank=2), "rank 2 is not in a world of 2"),
    ],
)
def test_arguments_that_cannot_work_are_refused_at_once(arguments, message):
    given = dict(rank=0, world_size=2, group_name="g", backend="gloo", timeout_s=1) | arguments
    with pytest.raises(ValueError, match=message):
        join_group("127.0.0.1", 1, **given)
