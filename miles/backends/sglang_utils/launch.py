"""Starting a real SGLang server for a run."""

from __future__ import annotations

import contextlib
import socket
import tempfile
from pathlib import Path
from typing import Any

from miles.backends.engine_api.launcher import EngineProcess
from miles.backends.engine_api.topology import PREFILL
from miles.backends.sglang_utils.command import runs_on_cpu, server_environment, server_options
from miles.backends.sglang_utils.installation import Installation, installed
from miles.utils.process import hold_port, hold_ports, spawn

_DATA_PARALLEL_PORTS = 8
_SERVE = Path(__file__).parent / "inside" / "serve.py"


def launch(
    args: Any,
    *,
    index: int,
    host: str,
    port: int,
    admin_key: str,
    model_path: str,
    log_path: Path,
    weight_version: int,
    gpu_ids: list[int] | None = None,
) -> EngineProcess:
    """Start the server by the interpreter `--sglang-python`, on ports that are held for it until it has bound them.

    Raises: SglangMissing; UnknownOption, with every `--sglang-*` flag that the installed SGLang does not have.
    """
    installation = installed(getattr(args, "sglang_python", None))
    with contextlib.ExitStack() as held:
        http = held.enter_context(hold_port(getattr(args, "sglang_host", None) or host, port))
        bound_port = http.getsockname()[1]
        own = _own_options(args, index, model_path, admin_key, weight_version, installation)
        own |= {"host": http.getsockname()[0], "port": bound_port}
        further, sockets = _further_ports(args, host)
        own |= further
        for sock in sockets:
            held.enter_context(sock)
        sockets = [http, *sockets]
        command = _command(installation, sockets, server_options(args, installation, own))
        ranks = own["tp_size"] * (getattr(args, "sglang_pp_size", None) or 1)
        env = server_environment(args, gpu_ids, ranks // (getattr(args, "sglang_nnodes", None) or 1))
        env["MILES_SGLANG_SCRATCH"] = tempfile.mkdtemp(prefix="miles-sglang-")  # short: sockets' paths have a limit
        process = spawn(command, log_path=log_path, env=env, pass_fds=[s.fileno() for s in sockets])
    return EngineProcess(process, f"http://{host}:{bound_port}", log_path)


def _further_ports(args: Any, host: str) -> tuple[dict[str, Any], list[socket.socket]]:
    """Where the server's ranks meet, and a prefill server with decode servers: options, and sockets that hold the ports."""
    ranks_meet = hold_port("127.0.0.1")
    options, held = {"nccl_port": ranks_meet.getsockname()[1]}, [ranks_meet]
    if getattr(args, "sglang_nnodes", None):  # the first node's actor holds the ports of the meeting
        options |= {name: getattr(args, f"sglang_{name}") for name in ("nnodes", "node_rank", "dist_init_addr")}
    elif (getattr(args, "sglang_dp_size", None) or 1) > 1:
        # Data-parallel ranks talk over ports above this one, which SGLang otherwise derives from the server's own.
        row = hold_ports("127.0.0.1", _DATA_PARALLEL_PORTS)
        options["dist_init_addr"] = f"127.0.0.1:{row[0].getsockname()[1]}"
        held += row
    if getattr(args, "sglang_disaggregation_mode", None) == PREFILL:
        meeting = hold_port(host)
        options["disaggregation_bootstrap_port"] = meeting.getsockname()[1]
        held.append(meeting)
    return options, held


def _own_options(
    args: Any, index: int, model_path: str, admin_key: str, weight_version: int, installation: Installation
) -> dict[str, Any]:
    """What the run decides for each server, by the name of the option's field."""
    devices = getattr(args, "rollout_num_gpus_per_engine", None) or 1
    own = {
        "model_path": model_path,
        "admin_api_key": admin_key,
        "weight_version": str(weight_version),
        # Engines must differ: with one seed, they would sample the same continuation of the same prompt.
        "random_seed": (getattr(args, "rollout_seed", None) or 0) + index,
        "tp_size": getattr(args, "sglang_tp_size", None) or devices // (getattr(args, "sglang_pp_size", None) or 1),
    }
    switches = {
        "trust_remote_code": getattr(args, "trust_remote_code", False),
        "enable_memory_saver": getattr(args, "offload_rollout", False) and not runs_on_cpu(args),
        "enable_return_routed_experts": getattr(args, "use_rollout_routing_replay", False),
        "enable_return_indexer_topk": getattr(args, "use_rollout_indexer_replay", False),
    }
    return own | {name: True for name, on in switches.items() if on}


def _command(installation: Installation, sockets: list[socket.socket], options: list[str]) -> list[str]:
    holds = [word for s in sockets for word in ("--hold", str(s.fileno()))]
    return [installation.python, str(_SERVE), *holds, "--", *options]
