"""One log file a process, in the run folder: `{run_dir}/logs/{name}.log`."""

from __future__ import annotations

import logging
import os
import sys
from pathlib import Path

FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"


def log_path(run_dir: str | Path, name: str) -> Path:
    return Path(run_dir) / "logs" / f"{name}.log"


def redirect_to_log(run_dir: str | Path, name: str) -> Path:
    """Send this process's stdout, stderr and logging to its file; native libraries' output included."""
    path = log_path(run_dir, name)
    path.parent.mkdir(parents=True, exist_ok=True)
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    sys.stdout.flush()
    sys.stderr.flush()
    os.dup2(fd, 1)
    os.dup2(fd, 2)
    os.close(fd)
    sys.stdout = os.fdopen(1, "w", buffering=1, closefd=False)
    sys.stderr = os.fdopen(2, "w", buffering=1, closefd=False)
    logging.basicConfig(level=logging.INFO, format=FORMAT, stream=sys.stderr, force=True)
    return path
