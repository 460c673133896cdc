"""A second torch.distributed world beside the default one: the trainer's source rank and the engine ranks.

Wire-compatible with SGLang's `/init_weights_update_group`: a TCPStore at (address, port) that rank 0 hosts, every key below
a prefix of the group's name, and the backend built by the helper that `init_process_group` itself uses. It works with
and without a default group in the process.
"""

from __future__ import annotations

import contextlib
import datetime
import re
import socket
import time
from typing import Any, cast

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

# NCCL's watchdog ends the process when a collective passes the group's timeout. The sender has its own deadline and
# aborts the group itself, so the watchdog comes second.
_NCCL_TIMEOUT_FACTOR = 4
_JOINED = re.compile(r"(\d+)/(\d+) clients joined")


class GroupJoinError(RuntimeError):
    """The group did not come together within its deadline."""


def join_group(
    master_address: str,
    master_port: int,
    rank: int,
    world_size: int,
    group_name: str,
    backend: str,
    timeout_s: float,
    device: torch.device | str | None = None,
    listener: socket.socket | None = None,
) -> dist.ProcessGroup:
    """Join a group of `world_size` ranks and return it; blocks until all have joined.

    Args:
        master_address, master_port: where rank 0 hosts the store. Rank 0 may pass `listener`, a listening socket that
            already holds the port, so that nobody else can take it; the socket is consumed.
        group_name: unique in this process while the group lives, and the same on every rank.
        backend: "gloo" or "nccl".
        timeout_s: deadline for joining, and for each gloo collective afterwards.
        device: the CUDA device that NCCL uses; None keeps the current one.
    Raises:
        ValueError: arguments that cannot work. GroupJoinError: not all joined in time, with how many are missing.
    """
    _check(rank, world_size, group_name, backend)
    deadline = time.monotonic() + timeout_s
    where = f"group {group_name!r} at {master_address}:{master_port}"
    store = _open_store(master_address, master_port, rank, world_size, timeout_s, listener, where)
    remaining = max(deadline - time.monotonic(), 0.1)
    timeout = datetime.timedelta(seconds=timeout_s * _NCCL_TIMEOUT_FACTOR if backend == "nccl" else remaining)
    store.set_timeout(datetime.timedelta(seconds=remaining))
    on_device = torch.cuda.device(device) if backend == "nccl" and device is not None else contextlib.nullcontext()
    try:
        with on_device:
            group, _ = c10d._new_process_group_helper(
                world_size,
                rank,
                [],
                c10d.Backend(backend),
                c10d.PrefixStore(group_name, store),
                group_name=cast(Any, group_name),
                backend_options=None,
                timeout=timeout,
            )
    except RuntimeError as error:
        raise GroupJoinError(
            f"{where}: all {world_size} ranks reached the store, but rank {rank} could not connect to every peer within "
            f"{timeout_s:g} s; a peer died, or its ports are not reachable from here: {error}"
        ) from error
    c10d._world.pg_group_ranks[group] = {i: i for i in range(world_size)}
    if backend == "gloo":
        c10d._set_pg_timeout(datetime.timedelta(seconds=timeout_s), group)
    return group


def leave_group(group: dist.ProcessGroup, *, abort: bool = False) -> None:
    """Leave a joined group and free its name. With `abort`, collectives in progress end with an error (NCCL)."""
    if c10d._world.pg_map.get(group) is None:
        return
    if abort:
        with contextlib.suppress(Exception):  # not every backend can abort; shutting down follows anyway
            group.abort()
    dist.destroy_process_group(group)


def _check(rank: int, world_size: int, group_name: str, backend: str) -> None:
    if backend not in ("gloo", "nccl"):
        raise ValueError(f"weight-update group backend {backend!r}: use 'gloo' or 'nccl'")
    if not group_name:
        raise ValueError("a weight-update group needs a name")
    if not 0 <= rank < world_size:
        raise ValueError(f"group {group_name!r}: rank {rank} is not in a world of {world_size}")
    if backend == "nccl" and not dist.is_nccl_available():
        raise ValueError("weight-update group backend 'nccl' needs a CUDA build of torch; use 'gloo' on a CPU")
    if dist.is_initialized() and c10d._get_default_group().bound_device_id is not None:
        # torch would try to split the new communicator off the default one, whose ranks are not in this group.
        raise ValueError(
            f"group {group_name!r}: the default process group is bound to a device; call init_process_group without device_id"
        )


def _open_store(
    address: str, port: int, rank: int, world_size: int, timeout_s: float, listener: socket.socket | None, where: str
) -> dist.TCPStore:
    try:
        return dist.TCPStore(
            address,
            port,
            world_size,
            is_master=rank == 0,
            timeout=datetime.timedelta(seconds=timeout_s),
            multi_tenant=listener is None,
            master_listen_fd=listener.detach() if listener is not None else None,
        )
    except (RuntimeError, ValueError) as error:
        if found := _JOINED.search(str(error)):
            joined, wanted = int(found[1]), int(found[2])
            raise GroupJoinError(
                f"{where}: {wanted - joined} of {wanted} ranks did not join within {timeout_s:g} s"
            ) from error
        role = "host the store" if rank == 0 else "reach rank 0's store"
        raise GroupJoinError(f"{where}: rank {rank} could not {role} within {timeout_s:g} s: {error}") from error
