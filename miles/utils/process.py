"""Child processes that never outlive the run, and ports that are reserved by binding them."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import socket
import subprocess
from collections.abc import Sequence
from pathlib import Path

_PR_SET_PDEATHSIG = 1
_ROW_ATTEMPTS = 50


def _die_with_parent() -> None:
    """Runs in the child before exec: SIGKILL when the parent dies, and a process group of its own."""
    os.setsid()
    ctypes.CDLL("libc.so.6", use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def spawn(
    command: Sequence[str], *, log_path: Path | None, env: dict[str, str], pass_fds: Sequence[int] = ()
) -> subprocess.Popen:
    """Start `command` with output to `log_path` (None: ours); the kernel kills it if this process dies, however it dies.

    Call it from a thread that lives as long as the process does: Linux ties the death signal to the spawning thread.
    """
    with contextlib.ExitStack() as files:
        log = None
        if log_path is not None:
            log_path.parent.mkdir(parents=True, exist_ok=True)
            log = files.enter_context(open(log_path, "ab", buffering=0))
        return subprocess.Popen(
            list(command),
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=None if log is None else subprocess.STDOUT,
            env=env,
            preexec_fn=_die_with_parent,
            pass_fds=list(pass_fds),
        )


def terminate(process: subprocess.Popen, *, grace_s: float = 5.0) -> None:
    """End a process started by `spawn`, and its children: SIGTERM, then SIGKILL to the group after `grace_s`."""
    if process.poll() is None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(grace_s)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(grace_s)


def reserve_port(host: str = "127.0.0.1", port: int = 0) -> socket.socket:
    """A listening socket that holds a port (any free one for 0) until it is closed or handed to the server.

    Raises: OSError that names the port when somebody else has it.
    """
    return _take_port(host, port, listen=True)


def hold_port(host: str = "127.0.0.1", port: int = 0) -> socket.socket:
    """A socket that is bound to a port (any free one for 0) and does not listen, for a server that binds it by itself.

    While it is open, the port is given to nobody who asks for any port, and a server that sets SO_REUSEADDR, as servers
    do, can still listen on it. Raises: OSError that names the port when somebody listens there.
    """
    return _take_port(host, port, listen=False)


def hold_ports(host: str, count: int) -> list[socket.socket]:
    """`hold_port` for `count` ports in a row, for a server that derives further ports from the one that it is told.

    Raises: OSError when no such row is free.
    """
    for _ in range(_ROW_ATTEMPTS):
        held = [hold_port(host)]
        first = held[0].getsockname()[1]
        try:
            for port in range(first + 1, first + count):
                held.append(hold_port(host, port))
            return held
        except (OSError, OverflowError):  # the row meets a port that is taken, or the last one
            for sock in held:
                sock.close()
    raise OSError(f"no {count} ports in a row are free on {host}")


def _take_port(host: str, port: int, *, listen: bool) -> socket.socket:
    sock = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        sock.bind((host, port))
        if listen:
            sock.listen(2048)
    except OSError as error:
        sock.close()
        raise OSError(error.errno, f"port {port} on {host} is in use by another process: {error.strerror}") from error
    return sock


def tail(path: Path, lines: int = 20) -> str:
    """The last lines of a log, for error messages; empty when there is none."""
    try:
        with open(path, "rb") as f:
            f.seek(0, os.SEEK_END)
            f.seek(max(0, f.tell() - 64 * 1024))
            return "\n".join(f.read().decode(errors="replace").splitlines()[-lines:])
    except OSError:
        return ""
