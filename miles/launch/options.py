"""What the launcher is told: by its flags, else by MILES_SCRIPT_* variables, else by the batch system."""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

DRIVERS = ("train.py", "train_async.py")
DEFAULT_PORT = 6379


class LaunchError(ValueError):
    """The launcher cannot do what it is told. The message says what to set."""


@dataclass(frozen=True)
class Options:
    """`driver_flags` go to the driver as they are."""

    driver: str
    driver_flags: tuple[str, ...]
    address: str | None
    num_nodes: int
    node_rank: int
    head: str | None
    port: int | None
    num_gpus: int | None
    num_cpus: int | None
    submit: str
    wait_timeout: float
    env: dict[str, str]

    @property
    def dry_run(self) -> bool:
        return "--dry-run" in self.driver_flags


def build_parser(description: str | None = None) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    add = parser.add_argument
    add(
        "--driver",
        default=_env("driver", "train.py"),
        metavar="FILE",
        help="train.py, train_async.py, or a driver of yours",
    )
    add(
        "--address",
        default=_env("ray_address") or os.environ.get("RAY_ADDRESS"),
        metavar="HOST:PORT",
        help="join this Ray cluster instead of starting one; http://HOST:PORT is its job server",
    )
    add(
        "--num-nodes",
        type=int,
        default=_env("num_nodes") or os.environ.get("SLURM_JOB_NUM_NODES", "1"),
        help="nodes of the cluster; the same command runs on each",
    )
    add(
        "--node-rank",
        type=int,
        default=_env("node_rank") or os.environ.get("SLURM_NODEID", "0"),
        help="which of them this is; 0 starts the cluster and the driver",
    )
    add("--head", default=_env("head"), metavar="HOST", help="address of node 0, as the others reach it")
    add("--port", type=int, default=_env("port"), help=f"port of the head ({DEFAULT_PORT}; any free one for one node)")
    add("--num-gpus", type=int, default=_env("num_gpus"), help="GPUs of this node to use (all that Ray finds)")
    add("--num-cpus", type=int, default=_env("num_cpus"), help="CPUs of this node to use (all that Ray finds)")
    add(
        "--submit",
        choices=("direct", "job"),
        default=_env("submit"),
        help="direct: the driver is a process of this node; job: Ray's job server runs it, which needs ray[default] "
        "(job where --address is http://..., else direct)",
    )
    add(
        "--wait-timeout",
        type=float,
        default=_env("wait_timeout", "600"),
        help="seconds that nodes wait for each other (600)",
    )
    add(
        "--env",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="environment of every process of the run; may be repeated",
    )
    add("driver_flags", nargs=argparse.REMAINDER, help="-- and the driver's flags; later ones win")
    return parser


def parse(argv: Sequence[str] | None = None, description: str | None = None) -> Options:
    """Raises LaunchError with everything that is wrong."""
    given = build_parser(description).parse_args(argv)
    flags = given.driver_flags[1:] if given.driver_flags[:1] == ["--"] else given.driver_flags
    http = (given.address or "").startswith(("http://", "https://"))
    problems = []
    env: dict[str, str] = {}
    for pair in given.env:
        name, equals, value = pair.partition("=")
        if not (name and equals):
            problems.append(f"--env {pair}: write NAME=VALUE")
        env[name] = value
    if not _driver_file(given.driver).is_file():
        problems.append(f"--driver {given.driver}: no such file; there are {' and '.join(DRIVERS)}, or give a path")
    if not 0 <= given.node_rank < given.num_nodes:
        problems.append(f"--node-rank {given.node_rank} is not below --num-nodes {given.num_nodes}")
    if given.num_nodes > 1 and given.node_rank > 0 and not given.head:
        problems.append("--node-rank above 0 needs --head: the address of node 0")
    if given.address and given.num_nodes > 1:
        problems.append("--address joins a cluster that is there, --num-nodes makes one: give one of them")
    if http and given.submit == "direct":
        problems.append(f"--address {given.address} is a job server: drop --submit direct, or give HOST:PORT")
    if given.submit == "job" and given.address and not http:
        problems.append(
            f"--submit job needs the job server of the cluster: --address http://HOST:8265, not {given.address}"
        )
    if problems:
        raise LaunchError("; ".join(problems))
    return Options(
        driver=str(_driver_file(given.driver)),
        driver_flags=tuple(flags),
        address=given.address,
        num_nodes=given.num_nodes,
        node_rank=given.node_rank,
        head=given.head,
        port=given.port,
        num_gpus=given.num_gpus,
        num_cpus=given.num_cpus,
        submit=given.submit or ("job" if http else "direct"),
        wait_timeout=given.wait_timeout,
        env=env,
    )


REPOSITORY = Path(__file__).resolve().parents[2]


def _driver_file(name: str) -> Path:
    return REPOSITORY / name if name in DRIVERS else Path(name).resolve()


def _env(name: str, default: str | None = None) -> str | None:
    return os.environ.get(f"MILES_SCRIPT_{name.upper()}") or default
