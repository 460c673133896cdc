"""The environment that every process of a run should see, whichever node it is on."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Mapping, Sequence

from miles.launch.options import REPOSITORY

# Settings of the user's that a process on another node needs as much as one here.
_FORWARDED = re.compile(
    r"(NCCL|GLOO|TORCH_NCCL|UCX|SGLANG|MILES|HF|WANDB|TENSORBOARD|MASTER)_.*|(no|http|https)_proxy", re.I
)
_NOT_FORWARDED = re.compile(r"MILES_SCRIPT_.*|MILES_TEST_.*")


def run_environment(
    driver_flags: Sequence[str], head: str, given: Mapping[str, str], ambient: Mapping[str, str] = os.environ
) -> dict[str, str]:
    """What to set, beside what processes have already: `given` wins over `ambient`, which wins over what fits the flags.

    PYTHONPATH has this checkout first, then the Megatron of MILES_SCRIPT_MEGATRON_PATH, then what was there.
    """
    defaults = {"PYTHONUNBUFFERED": "1", "MASTER_ADDR": head, "RAY_AUTH_MODE": "disabled", "OMP_NUM_THREADS": "1"}
    if _backend(driver_flags) != "fsdp":
        # Megatron overlaps communication with compute by the order of kernel launches, which needs one queue.
        defaults["CUDA_DEVICE_MAX_CONNECTIONS"] = "1"
    if "NCCL_NVLS_ENABLE" not in ambient and (nvlink := has_nvlink()) is not None:
        defaults["NCCL_NVLS_ENABLE"] = "1" if nvlink else "0"
    forwarded = {k: v for k, v in ambient.items() if _FORWARDED.fullmatch(k) and not _NOT_FORWARDED.fullmatch(k)}
    paths = [str(REPOSITORY), ambient.get("MILES_SCRIPT_MEGATRON_PATH"), ambient.get("PYTHONPATH")]
    env = defaults | {k: ambient[k] for k in defaults if k in ambient} | forwarded | dict(given)
    env["PYTHONPATH"] = given.get("PYTHONPATH") or os.pathsep.join(filter(None, paths))
    # Calls among the nodes must not go through a proxy.
    hosts = dict.fromkeys([*filter(None, env.get("no_proxy", "").split(",")), "127.0.0.1", "localhost", head])
    env["no_proxy"] = ",".join(hosts)
    return env


def _backend(driver_flags: Sequence[str]) -> str | None:
    """The last `--train-backend` wins, as in the driver."""
    found = None
    for i, word in enumerate(driver_flags):
        name, equals, value = word.partition("=")
        if name == "--train-backend":
            found = value if equals else (driver_flags[i + 1] if i + 1 < len(driver_flags) else None)
    return found


def has_nvlink() -> bool | None:
    """Whether the GPUs here are joined by NVLink; None where there is no GPU to ask."""
    if shutil.which("nvidia-smi") is None:
        return None
    try:
        done = subprocess.run(["nvidia-smi", "topo", "-m"], capture_output=True, text=True, timeout=30, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return bool(re.search(r"\bNV\d+\b", done.stdout)) if done.returncode == 0 else None
