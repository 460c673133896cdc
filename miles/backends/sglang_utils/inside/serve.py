"""SGLang's server, unchanged, as a process that leaves nothing behind.

    python serve.py [--hold FD]... -- OPTIONS OF sglang.launch_server

SGLang's server starts its scheduler and detokenizer as processes of their own. They notice the server's death only once
they have finished importing, which takes many seconds, and some helpers never do. So a guard is forked before anything
else: it does nothing but wait for the server's end, however that comes, and then kills the server's process group.

`--hold`: inherited sockets that are bound to the ports that the server will take. They do not listen, so the server can
bind the port too (both set SO_REUSEADDR), while nobody else is given it in the meantime.

The environment variable MILES_SGLANG_SCRATCH names an existing folder for the server's temporary files, sockets among them,
which SGLang leaves behind however it ends. The guard deletes it.

Multiprocessing imports this file again in every child: all that it does is below `__main__`.
"""

from __future__ import annotations

import os
import runpy
import shutil
import signal
import sys

SCRATCH = "MILES_SGLANG_SCRATCH"
_GRACE_S = 1.0


def guard_the_group() -> None:
    """Fork the guard, which ends the group as soon as this process is gone, or `_GRACE_S` after the group is told to end.

    (SGLang looks every 5 s whether it was told to, and by then its schedulers are gone: they obey at once.)
    """
    ends, _held = os.pipe()  # what holds the other end is this process alone: programs that it starts do not inherit it
    group = os.getpgrp()
    if (child := os.fork()) != 0:
        os.close(ends)
        os.waitpid(child, 0)
        return
    if os.fork() != 0:
        os._exit(0)  # so that the guard is no descendant: SGLang kills its own before it gives up
    signal.signal(signal.SIGTERM, lambda *_: signal.setitimer(signal.ITIMER_REAL, _GRACE_S))
    signal.signal(signal.SIGALRM, lambda *_: _end(group))
    for signum in (signal.SIGINT, signal.SIGHUP, signal.SIGQUIT):
        signal.signal(signum, signal.SIG_IGN)
    os.dup2(ends, 0)
    os.closerange(1, min(os.sysconf("SC_OPEN_MAX"), 1 << 16))
    os.read(0, 1)
    _end(group)


def _end(group: int) -> None:
    shutil.rmtree(os.environ[SCRATCH], ignore_errors=True)
    os.killpg(group, signal.SIGKILL)  # the guard with it


def main(argv: list[str]) -> None:
    own, server = argv[: argv.index("--")], argv[argv.index("--") + 1 :]
    if os.getpgrp() != os.getpid():
        sys.exit("serve.py must lead a process group of its own: everything in it is killed when the server ends")
    os.environ["TMPDIR"] = os.environ[SCRATCH]
    guard_the_group()
    for fd in own:  # kept by this process alone
        if fd != "--hold":
            os.set_inheritable(int(fd), False)
    sys.argv = ["sglang.launch_server", *server]
    runpy.run_module("sglang.launch_server", run_name="__main__")


if __name__ == "__main__":
    main(sys.argv[1:])
