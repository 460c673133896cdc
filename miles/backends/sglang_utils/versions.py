"""What a run needs of the SGLang that is installed, and what is known about releases."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from miles.backends.sglang_utils.installation import Installation

# Releases whose API is known here: (first, last). Others may well work, and are told.
TRIED = ((0, 5, 16), (0, 5, 23))


@dataclass(frozen=True)
class Need:
    """An option that the run gives a server by itself; `since`: the first release that has it, where that is known."""

    field: str
    flag: str
    asked_for: Callable[[Any], Any]
    since: str | None = None


_NEEDS = (
    Need("admin_api_key", "a run", lambda a: True),
    Need("weight_version", "a run", lambda a: True),
    Need("random_seed", "a run", lambda a: True),
    Need("nccl_port", "a run", lambda a: True),
    Need("enable_memory_saver", "--offload-rollout", lambda a: a.offload_rollout),
    Need("enable_return_routed_experts", "--use-rollout-routing-replay", lambda a: a.use_rollout_routing_replay, "0.5.9"),
    Need("enable_return_indexer_topk", "--use-rollout-indexer-replay", lambda a: a.use_rollout_indexer_replay),
    Need("dist_init_addr", "--sglang-dp-size", lambda a: (a.sglang_dp_size or 1) > 1),
    Need("nnodes", "an engine over several nodes", lambda a: a.rollout_num_gpus_per_engine > a.num_gpus_per_node),
    Need("disaggregation_mode", "--prefill-num-servers", lambda a: a.prefill_num_servers),
    Need("disaggregation_bootstrap_port", "--prefill-num-servers", lambda a: a.prefill_num_servers),
)  # fmt: skip


def lacking(args: Any, installation: Installation) -> Iterator[str]:
    """Options that this run needs and this SGLang does not have, with the flag that needs them and what to install."""
    for need in _NEEDS:
        if need.asked_for(args) and installation.find(need.field) is None:
            newer = f"SGLang {need.since} or newer" if need.since else "another release"
            yield (
                f"SGLang {installation.version} ({installation.python}) has no option --{need.field.replace('_', '-')}, which "
                f"{need.flag} needs: install {newer}"
            )


def untried(installation: Installation) -> str | None:
    """What to say about a release whose API nobody here has looked at; None for one that is known."""
    found = release(installation.version)
    first, last = (".".join(map(str, each)) for each in TRIED)
    if found is not None and TRIED[0] <= found <= TRIED[1]:
        return None
    what = "of unknown version" if found is None else "older" if found < TRIED[0] else "newer"
    return (
        f"SGLang {installation.version} ({installation.python}) is {what}; its API is known from {first} to {last}. "
        "Options that it lacks are refused, and each update is verified; look at the first steps' metrics"
    )


def release(version: str) -> tuple[int, int, int] | None:
    """The three numbers of a version; None for one that has none."""
    match = re.match(r"(\d+)\.(\d+)\.(\d+)", version)
    return (int(match[1]), int(match[2]), int(match[3])) if match else None
