"""A worker process of the scoring pool: `python -m miles.rollout.rm_hub.scoring_worker FD PARENT_PID`.

Takes (function path, positional arguments) from a socket, one after the other, and answers ("started",) when the
function is imported and about to run, then ("done", value) or ("failed", exception).
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import pickle
import signal
import sys
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

_PR_SET_PDEATHSIG = 1


def die_with_parent(parent_pid: int) -> None:
    """Have the kernel kill this process when the thread that started it ends, also in the middle of a scoring."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent_pid:  # it died before the line above
        os._exit(0)


def die_first_when_memory_runs_out() -> None:
    """A verifier may build a number that fills the memory: then this process has to go, and not an engine or a trainer."""
    with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w") as f:
        f.write("1000")


def run(connection: Connection) -> None:
    """Serve until the other end closes."""
    from miles.utils.imports import load_function

    while True:
        try:
            path, arguments = connection.recv()
        except EOFError:
            return
        try:
            function: Callable[..., Any] = load_function(path)
            connection.send(("started",))
            answer: tuple[str, Any] = ("done", function(*arguments))
        except Exception as error:
            answer = ("failed", _portable(error))
        try:
            connection.send(answer)
        except (pickle.PicklingError, TypeError, AttributeError, ValueError) as error:
            connection.send(("failed", TypeError(f"{path} returned what cannot be sent between processes: {error}")))


def _portable(error: Exception) -> Exception:
    """The exception itself if it survives pickling, else its text."""
    try:
        pickle.loads(pickle.dumps(error))
        return error
    except Exception:
        return RuntimeError(f"{type(error).__name__}: {error}")


def main() -> None:
    die_with_parent(int(sys.argv[2]))
    die_first_when_memory_runs_out()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C goes to the whole terminal; the pool's owner ends its workers
    connection = Connection(int(sys.argv[1]))
    with open(os.devnull, "w") as quiet:
        sys.stdout = quiet  # verifiers that print must not write into the run's output
        run(connection)


if __name__ == "__main__":
    main()
