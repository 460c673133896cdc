"""Where processes go: a Ray cluster to run on, and placement groups ordered trainer, rollout, evaluation."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import ray
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

logger = logging.getLogger(__name__)
_START_ATTEMPTS = 3
_TOO_SLOW = "timed out during startup"


class PlacementError(RuntimeError):
    """The cluster does not have what the run needs."""


@dataclass(frozen=True)
class Demand:
    """Ranks a run needs: one bundle (a GPU and a CPU, or CPUs alone) each."""

    trainer: int
    rollout: int
    evaluation: int
    colocate: bool
    gpus: bool
    gpus_per_rank: float = 1.0  # below 1, several ranks share a GPU

    @property
    def bundles(self) -> int:
        own = max(self.trainer, self.rollout) if self.colocate else self.trainer + self.rollout
        return own + self.evaluation

    @property
    def rollout_offset(self) -> int:
        return 0 if self.colocate else self.trainer


def demand_of(args: Any) -> Demand:
    """Bundles that `args` asks for. Debug modes leave out the side that they do not run."""
    return Demand(
        trainer=0 if args.debug_rollout_only else args.actor_num_nodes * args.actor_num_gpus_per_node,
        rollout=0 if args.debug_train_only or args.rollout_external else (args.rollout_num_gpus or 0),
        evaluation=args.eval_num_gpus or 0,
        colocate=bool(args.colocate),
        gpus=args.train_device == "cuda",
        gpus_per_rank=args.gpus_per_rank,
    )


def connect_ray(demand: Demand) -> None:
    """Join the cluster that RAY_ADDRESS names, else start a private one that ends with this process."""
    if ray.is_initialized():
        return
    os.environ.setdefault("RAY_AUTH_MODE", "disabled")
    # Ray would otherwise give every worker as many OpenMP threads as it has CPUs.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    options: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.WARNING, "include_dashboard": False}
    if os.environ.get("RAY_ADDRESS"):
        # What the launcher names: settings that processes on the cluster's nodes would not have by themselves.
        names = [name for name in os.environ.get("MILES_FORWARD_ENV", "").split(",") if name in os.environ]
        runtime: dict[str, Any] = (
            {"runtime_env": {"env_vars": {name: os.environ[name] for name in names}}} if names else {}
        )
        ray.init(address=os.environ["RAY_ADDRESS"], log_to_driver=False, logging_level=logging.WARNING, **runtime)
        return
    # CPUs are logical here: without GPUs every rank takes one, and a laptop may have fewer than ranks.
    cpus = max(demand.bundles + 4, os.cpu_count() or 1)
    for attempt in range(_START_ATTEMPTS):
        try:
            # "local": a cluster that somebody else has started on this host is not joined by chance.
            ray.init("local", num_cpus=cpus, object_store_memory=1 << 30, **options)
            return
        except Exception as error:
            # Ray gives its own processes 30 s, which a busy host may not keep to. They end with this process.
            if _TOO_SLOW not in str(error) or attempt + 1 == _START_ATTEMPTS:
                raise
            logger.warning("Ray did not start within its own 30 s; it is started again")
            ray.shutdown()


def wait_for_resources(demand: Demand, timeout_s: float) -> None:
    """Return once the cluster has what the run needs; else raise PlacementError with what there is and what lacks."""
    kind = "GPU" if demand.gpus else "CPU"
    needed = demand.bundles * (demand.gpus_per_rank if demand.gpus else 1)
    deadline = time.monotonic() + timeout_s
    while True:
        nodes = [node for node in ray.nodes() if node["Alive"]]
        have = sum(node["Resources"].get(kind, 0) for node in nodes)
        if have >= needed:
            return
        if time.monotonic() >= deadline or not os.environ.get("RAY_ADDRESS"):
            per_node = ", ".join(f"{n['NodeManagerAddress']}: {n['Resources'].get(kind, 0):g}" for n in nodes)
            raise PlacementError(
                f"the run needs {needed:g} {kind}s (trainer {demand.trainer}, rollout {demand.rollout}, "
                f"evaluation {demand.evaluation}{', trainer and rollout shared' if demand.colocate else ''}) but the "
                f"cluster has {have:g} on {len(nodes)} node(s) ({per_node}). Add nodes to the Ray cluster, or lower "
                "--actor-num-nodes, --actor-num-gpus-per-node or --rollout-num-gpus."
            )
        time.sleep(1.0)


class Placement:
    """One placement group; logical rank i is bundle `order[i]`, sorted by node (and GPU) so that ranks are stable."""

    def __init__(self, demand: Demand, timeout_s: float, ask_for_gpus: bool = False) -> None:
        """`ask_for_gpus`: find out which GPU each bundle has, in seconds; needed where a process uses several."""
        self.demand = demand
        wait_for_resources(demand, timeout_s)
        bundle: dict[str, float] = {"GPU": demand.gpus_per_rank, "CPU": 1} if demand.gpus else {"CPU": 1}
        self.group: PlacementGroup | None = None
        self.order: list[int] = []
        self._gpus: dict[int, int] = {}
        if demand.bundles == 0:
            return
        self.group = placement_group([bundle] * demand.bundles, strategy="PACK")
        ready, _ = ray.wait([self.group.ready()], timeout=timeout_s)
        if not ready:
            free = ray.available_resources()
            raise PlacementError(
                f"{demand.bundles} bundles of {bundle} were not granted within {timeout_s:g} s; free now: {free}. "
                "Another job may hold them: stop it, or wait and start again."
            )
        nodes = ray.util.placement_group_table(self.group)["bundles_to_node_id"]
        address = {node["NodeID"]: node["NodeManagerAddress"] for node in ray.nodes()}
        self._gpus = _gpus_of_bundles(self.group, demand.bundles, timeout_s) if demand.gpus and ask_for_gpus else {}
        self.order = sorted(
            range(demand.bundles), key=lambda i: (_address_key(address[nodes[i]]), self._gpus.get(i, 0), i)
        )

    def gpu_ids(self, logical_ranks: Iterable[int]) -> list[int]:
        """Which GPUs of their node the bundles of `logical_ranks` have; only after `ask_for_gpus`."""
        return [self._gpus[self.order[rank]] for rank in logical_ranks]

    def strategy(self, logical_rank: int) -> PlacementGroupSchedulingStrategy:
        if self.group is None:
            raise PlacementError("this run has no ranks to place")
        return PlacementGroupSchedulingStrategy(
            placement_group=self.group, placement_group_bundle_index=self.order[logical_rank]
        )

    def actor_options(self, logical_rank: int, share: float) -> dict[str, Any]:
        """Ray options for an actor on a bundle; `share` of its GPU (or of its CPU, where there is none)."""
        options: dict[str, Any] = {"scheduling_strategy": self.strategy(logical_rank)}
        if self.demand.gpus:
            return options | {"num_gpus": share * self.demand.gpus_per_rank, "num_cpus": share}
        return options | {"num_cpus": share}

    def remove(self) -> None:
        if self.group is not None:
            remove_placement_group(self.group)
            self.group = None


def _gpus_of_bundles(group: PlacementGroup, bundles: int, timeout_s: float) -> dict[int, int]:
    """GPU number of each bundle on its node."""

    @ray.remote(num_cpus=0, num_gpus=0.01, max_retries=0)
    def gpu() -> int:
        return int(ray.get_gpu_ids()[0])

    asked = [
        gpu.options(
            scheduling_strategy=PlacementGroupSchedulingStrategy(placement_group=group, placement_group_bundle_index=i)
        ).remote()
        for i in range(bundles)
    ]
    return dict(enumerate(ray.get(asked, timeout=timeout_s)))


def _address_key(address: str) -> tuple:
    parts = address.split(".")
    return tuple(int(p) for p in parts) if all(p.isdigit() for p in parts) else (address,)
