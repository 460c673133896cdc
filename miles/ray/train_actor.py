"""One trainer rank: a process group, a backend, and the sending side of weight updates."""

from __future__ import annotations

import datetime
import os
import random
import socket
import threading
import time
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ray

from miles.backends.training_utils.ragged import pack, unpack
from miles.utils.imports import load_function
from miles.utils.process import reserve_port
from miles.utils.process_logging import redirect_to_log

if TYPE_CHECKING:
    from miles.backends.training_utils.backend import TrainParallelConfig, TrainShard
    from miles.weight_update.types import EngineEndpoint, TransferReport


CRITIC = "critic"  # the role of ranks that train one; the others' is "trainer"
BACKENDS = {
    "fsdp": "miles.backends.fsdp_utils.backend.FSDPBackend",
    "megatron": "miles.backends.megatron_utils.backend.MegatronBackend",
}


@dataclass(frozen=True)
class TrainerInfo:
    """What a rank reports after it has loaded."""

    start_rollout_id: int
    parallel: TrainParallelConfig
    dp_rank: int
    driver_state: dict[str, Any] | None


class TrainActor:
    """A rank of the train group. Work runs in the default group; a dead engine is caught up from the `weights` group,
    so that it need not wait for the training step in progress."""

    def __init__(self, args: Any, rank: int, world_size: int, role: str = "trainer") -> None:
        os.environ.update({k: str(v) for k, v in (args.train_env_vars or {}).items()})
        redirect_to_log(args.run_dir, f"{role}_{rank}")
        # Batches are read-only views into the object store, and nothing writes to them.
        warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
        self.args, self.rank, self.world_size, self.role = args, rank, world_size, role
        self._listener: socket.socket | None = None

    def prepare(self) -> None:
        """Import what `init` needs, while something else still has the device."""

        load_function(BACKENDS.get(self.args.train_backend, self.args.train_backend))

    def rendezvous(self) -> tuple[str, int]:
        """Rank 0: an address that the other ranks can reach, held open until they do."""
        address = ray.util.get_node_ip_address()
        self._listener = listener = reserve_port(address)
        return address, listener.getsockname()[1]

    def init(self, address: str, port: int) -> TrainerInfo:
        """Join the process group and load the model."""
        import numpy
        import torch
        import torch.distributed as dist

        from miles.weight_update.updater import WeightUpdater

        args = self.args
        timeout = datetime.timedelta(minutes=args.distributed_timeout_minutes)
        torch.set_num_threads(args.actor_cpus_per_rank)
        cuda = args.train_device == "cuda"
        if cuda:
            torch.cuda.set_device(0)
        # Equal seeds on every rank: a backend that wants different streams derives them itself.
        random.seed(args.seed)
        numpy.random.seed(args.seed % 2**32)
        torch.manual_seed(args.seed)
        store = dist.TCPStore(
            address,
            port,
            self.world_size,
            is_master=self.rank == 0,
            timeout=timeout,
            master_listen_fd=self._listener.detach() if self._listener is not None else None,
        )
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if cuda else "gloo",
            store=store,
            rank=self.rank,
            world_size=self.world_size,
            timeout=timeout,
        )
        self.backend = load_function(BACKENDS.get(args.train_backend, args.train_backend))(
            args,
            "critic" if self.role == CRITIC else "actor",
            with_ref=bool(args.use_kl_loss or args.kl_coef),
        )
        start = self.backend.load()
        if self.role != CRITIC:
            self.updater = WeightUpdater(args, self.backend)
        return TrainerInfo(start, self.backend.parallel, self.backend.dp_rank, self._driver_state(start))

    def _driver_state(self, start: int) -> dict[str, Any] | None:
        from miles.backends.training_utils.checkpoint import read_resume_state

        return None if start == 0 else read_resume_state(self.args.load, self.args.ckpt_step)

    def train(self, shards: list[Any], values: dict[int, Any] | None = None) -> list[dict[str, float]]:
        """Train on this rank's shard of a rollout batch. Returns metrics, one dict an optimizer step.

        Args:
            shards: references, by data-parallel rank; values: the critic's for them, likewise.
        """
        started = time.monotonic()
        shard: TrainShard = ray.get(shards[self.backend.dp_rank])
        if values is not None:
            shard.columns["values"] = unpack(ray.get(values[self.backend.dp_rank]))["values"]
        return self._train(shard, started)

    def train_critic(self, shards: list[Any]) -> tuple[list[dict[str, float]], dict[str, Any]]:
        """The critic's part: (metrics, the values from before its first step as a packed column)."""
        started = time.monotonic()
        shard: TrainShard = ray.get(shards[self.backend.dp_rank])
        steps = self._train(shard, started)
        return steps, pack({"values": [v.numpy() for v in shard.columns["values"]]})

    def _train(self, shard: TrainShard, started: float) -> list[dict[str, float]]:
        result = self.backend.train(shard)
        steps = result if isinstance(result, list) else [result]
        steps[-1]["perf/train_busy_time"] = time.monotonic() - started
        return steps

    def sleep(self, keep_weights: bool) -> None:
        """Give device memory back; with `keep_weights` all but what an update sends."""
        self.backend.sleep(keep_weights=keep_weights)

    def wake(self) -> None:
        self.backend.wake()

    def transfer_weights(self, version: int, engines: list[EngineEndpoint]) -> TransferReport | None:
        """Send the model to the engines. Collective over ranks; the source rank reports."""
        return self.updater.transfer(version, engines)

    @ray.method(concurrency_group="weights")
    def resend_weights(self, version: int, engines: list[EngineEndpoint]) -> TransferReport | None:
        """Send the weights of `version` again, from the copy kept at the last update, beside a running train step."""
        return self.updater.resend(version, engines)

    @ray.method(concurrency_group="watch")
    def wait_for_end(self) -> None:
        """Never returns. A caller that waits on it learns of this process's death at once, whatever else it does."""
        threading.Event().wait()

    def save(self, rollout_id: int, driver_state: dict[str, Any]) -> None:
        """Write this rank's part of checkpoint `rollout_id`; rank 0 publishes it when all have written. Collective."""
        import torch.distributed as dist

        from miles.backends.training_utils.checkpoint import CheckpointStore

        store = CheckpointStore(self.args.save)
        directory: list[Path | None] = [store.begin(rollout_id) if self.rank == 0 else None]
        dist.broadcast_object_list(directory, src=0)
        assert directory[0] is not None
        try:
            self.backend.save(directory[0])
            if self.rank == 0:
                store.commit(rollout_id, driver_state)
        except BaseException:
            if self.rank == 0:
                store.discard(rollout_id)  # on a full disk the half checkpoint would be in the way
            raise
        dist.barrier()

    def export_hf(self, directory: str) -> None:
        self.backend.export_hf(Path(directory))

    def after_save(self, rollout_id: int, checkpoint: str, exported: str | None) -> None:
        """Run `--custom-megatron-post-save-hook-path` on what `save` and `export_hf` wrote."""
        load_function(self.args.custom_megatron_post_save_hook_path)(self.args, rollout_id, checkpoint, exported)


_OPTIONS: Any = {"max_restarts": 0, "concurrency_groups": {"weights": 1, "watch": 1}}
RemoteTrainActor: Any = ray.remote(**_OPTIONS)(TrainActor)
