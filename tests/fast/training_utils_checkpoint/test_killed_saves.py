"""A save that is killed at any moment leaves a checkpoint that loads."""

import subprocess
import sys
from pathlib import Path

import pytest

from miles.backends.training_utils.checkpoint import CheckpointStore, resolve_load

# For k = 1, 2, ...: a forked child saves and is killed by SIGKILL right before its k-th change of the file system, in a
# fresh copy of the folder. Prints the number of children that were killed; the last child finishes.
_SCRIPT = """
import os, shutil, signal, sys
from pathlib import Path
from tests.fast.training_utils_checkpoint.test_store import save

base, out, rollout_id = Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3])

def die_before_change(k):
    seen = 0
    def hook(event, args):
        nonlocal seen
        writes = event == "open" and isinstance(args[2], int) and args[2] & (os.O_WRONLY | os.O_RDWR)
        if writes or event in ("os.rename", "os.mkdir", "os.remove", "os.rmdir"):
            seen += 1
            if seen == k:
                os.kill(os.getpid(), signal.SIGKILL)
    sys.addaudithook(hook)

k = 0
while True:
    k += 1
    root = out / str(k)
    shutil.copytree(base, root)
    pid = os.fork()
    if pid == 0:
        die_before_change(k)
        save(root, rollout_id, text="new", weight_version=99)
        os._exit(0)
    status = os.waitpid(pid, 0)[1]
    if os.WIFEXITED(status):
        break
    assert os.WTERMSIG(status) == signal.SIGKILL, status
print(k)
"""


def save_and_kill(base: Path, out: Path, rollout_id: int) -> int:
    repo = Path(__file__).resolve().parents[3]
    command = [sys.executable, "-c", _SCRIPT, str(base), str(out), str(rollout_id)]
    done = subprocess.run(command, cwd=repo, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    return int(done.stdout)


@pytest.mark.parametrize("rollout_id", [3, 2], ids=["a new id", "the same id again"])
def test_sigkill_before_every_write_leaves_a_checkpoint_that_loads(tmp_path, rollout_id):
    from tests.fast.training_utils_checkpoint.test_store import save

    base, out = tmp_path / "base", tmp_path / "out"
    save(base, 1, text="older")
    save(base, 2, text="old", weight_version=2)
    out.mkdir()
    children = save_and_kill(base, out, rollout_id)
    assert children > 8  # begin, three files, the folder's rename, the tracker and its rename: all were hit
    loaded = []
    for k in range(1, children + 1):
        store, step = resolve_load(out / str(k))
        folder = store.verify(step)
        loaded.append((step, (folder / "fsdp" / "part").read_text(), store.read_driver_state(step)["weight_version"]))
        save(out / str(k), 4)  # and the next save works on what is left
        assert CheckpointStore(out / str(k)).latest() == 4
    assert set(loaded) == {(2, "old", 2), (rollout_id, "new", 99)}
    assert loaded[0] == (2, "old", 2) and loaded[-1] == (rollout_id, "new", 99)
