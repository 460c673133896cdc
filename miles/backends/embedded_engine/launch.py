"""Starting an embedded engine for a run."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

from miles.backends.engine_api.launcher import EngineProcess
from miles.utils.memory import KEEP_FREED_MEMORY
from miles.utils.process import reserve_port, spawn


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
    faults: tuple[str, ...] = (),
) -> EngineProcess:
    """Start the server on a port that is bound here and handed over open, so that nobody can take it in between.

    `faults` makes this engine misbehave (see `faults.py`); the environment variable MILES_EMBEDDED_FAULTS adds more:
    `INDEX:NAME[=VALUE]`, comma separated.
    """
    listener = reserve_port(host, port)
    try:
        command = [sys.executable, "-m", "miles.backends.embedded_engine.server"]
        command += ["--model-path", model_path, "--fd", str(listener.fileno()), "--admin-api-key", admin_key]
        command += ["--weight-version", str(weight_version), *_engine_options(args)]
        for fault in [*faults, *_faults_from_environment(index)]:
            command += ["--fault", fault]
        process = spawn(command, log_path=log_path, env=_environment(args, gpu_ids), pass_fds=[listener.fileno()])
        bound_host, bound_port = listener.getsockname()[:2]
    finally:
        listener.close()
    return EngineProcess(process, f"http://{bound_host}:{bound_port}", log_path)


def _engine_options(args: Any) -> list[str]:
    options = {
        "--max-running-requests": getattr(args, "embedded_max_running_requests", None),
        "--num-threads": getattr(args, "embedded_num_threads", None),
        "--max-total-tokens": getattr(args, "embedded_max_total_tokens", None),
        "--dtype": getattr(args, "embedded_dtype", None),
        "--weight-update-timeout": getattr(args, "weight_update_timeout", None),
        "--device": "cpu" if getattr(args, "train_device", None) == "cpu" else None,
    }
    return [part for name, value in options.items() if value is not None for part in (name, str(value))]


def _environment(args: Any, gpu_ids: list[int] | None) -> dict[str, str]:
    threads = str(getattr(args, "embedded_num_threads", None) or 1)
    env = os.environ | {"OMP_NUM_THREADS": threads, "MKL_NUM_THREADS": threads, "TOKENIZERS_PARALLELISM": "false"}
    if getattr(args, "train_device", None) == "cpu":
        env |= KEEP_FREED_MEMORY
    if gpu_ids is not None:
        env["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, gpu_ids))
    return env


def _faults_from_environment(index: int) -> list[str]:
    entries = [e for e in os.environ.get("MILES_EMBEDDED_FAULTS", "").split(",") if e]
    return [fault for which, _, fault in (e.partition(":") for e in entries) if which == str(index)]
