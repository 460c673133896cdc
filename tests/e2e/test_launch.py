"""`scripts/launch.py` on real Ray: clusters of its own, joined by several nodes, ended whatever happens."""

import signal
import time
from importlib.util import find_spec

import pytest

from tests.e2e.harness import processes_of

pytestmark = pytest.mark.nightly

LAUNCH = "scripts/launch.py"


def test_two_nodes_make_a_cluster_train_and_both_end(flags, launch):
    """Each has room for one rank alone, so the run needs both."""
    from miles.utils.process import reserve_port

    with reserve_port() as free:
        port = free.getsockname()[1]
    nodes = ["--num-nodes", "2", "--head", "127.0.0.1", "--port", str(port), "--num-cpus", "1", "--wait-timeout", "120"]
    # The driver's flags mean nothing to a further node: it gets the same command.
    argv = ["--", *flags(num_rollout=2, actor_num_gpus_per_node=1)]
    second = launch([*nodes, "--node-rank", "1", *argv], "second", driver=LAUNCH)
    first = launch([*nodes, *argv], "first", driver=LAUNCH)
    run = first.wait().check()
    assert sorted(run.series("train/loss")) == [0, 1]
    assert set(run.series("contract/weight_digest_verified").values()) == {1.0}
    ended = second.wait(60)
    assert ended.returncode == 0 and "joined 127.0.0.1" in ended.output and "is gone" in ended.output
    for node in (run, ended):
        assert processes_of(node.run_dir) == []


def test_interrupt_ends_the_driver_then_ray(flags, launch):
    with launch(["--num-cpus", "3", "--env", "MARK=1", "--", *flags(num_rollout=500)], driver=LAUNCH) as run:
        run.wait_for_step(0)
        assert len(processes_of(run.run_dir)) > 5
        run.process.send_signal(signal.SIGINT)
        done = run.wait(60)
    assert done.returncode == 130 and "every process of this run has ended" in done.output
    assert processes_of(run.run_dir) == []


def test_the_drivers_exit_code_is_the_launchers(flags, launch):
    done = launch(["--num-cpus", "1", "--", *flags(num_rolout=2)], driver=LAUNCH).wait(120)
    assert done.returncode == 2 and "--num-rollout" in done.output
    assert processes_of(done.run_dir) == []


def test_a_killed_launcher_leaves_no_process(flags, launch):
    with launch(["--num-cpus", "3", "--", *flags(num_rollout=500)], driver=LAUNCH) as run:
        run.wait_for_step(0)
        run.process.kill()
        run.process.wait()
    deadline = time.monotonic() + 90  # Ray's own agents look for their parent now and then
    while time.monotonic() < deadline and processes_of(run.run_dir):
        time.sleep(0.5)
    assert processes_of(run.run_dir) == []


@pytest.mark.skipif(
    any(find_spec(name) is None for name in ("aiohttp_cors", "opencensus", "smart_open")),
    reason="Ray's job server is not installed here (pip install 'miles[jobs]'); scripts/nightly.sh installs it and runs this",
)
def test_rays_job_server_runs_the_driver_and_tells_its_exit_code(flags, launch):
    job = ["--submit", "job", "--num-cpus", "3", "--"]
    run = launch([*job, *flags(num_rollout=1)], "good", driver=LAUNCH).wait(400).check()
    assert "submitted job" in run.output and "step 1/1" in run.output
    bad = launch([*job, *flags(num_rolout=1)], "bad", driver=LAUNCH).wait(400)
    assert bad.returncode == 2 and "--num-rollout" in bad.output
    for done in (run, bad):
        assert processes_of(done.run_dir) == []
