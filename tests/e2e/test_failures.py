"""What happens when a part dies, and that it is told and cleaned up."""

import os
import signal
import time

from tests.e2e.harness import processes_of


def engine_pids(run) -> list[int]:
    return [pid for pid, command in processes_of(run.run_dir) if "embedded_engine.server" in command]


def trainer_pids(run) -> list[int]:
    """By the log that each writes to, in rank order."""
    logs = {str(run.run_dir / "logs" / f"trainer_{rank}.log"): rank for rank in (0, 1)}
    written = {pid: os.readlink(f"/proc/{pid}/fd/1") for pid, _ in processes_of(run.run_dir)}
    return sorted((pid for pid, log in written.items() if log in logs), key=lambda pid: logs[written[pid]])


def test_an_engine_killed_in_mid_rollout_is_replaced_and_the_run_goes_on(flags, launch):
    argv = flags(
        num_rollout=3,
        rollout_num_gpus=2,
        rollout_max_response_len=100,
        custom_rm_path="tests.helpers.rewards.slow_even_token_share",
    )
    with launch(argv) as run:
        run.wait_for_step(0, "perf/step_time")  # the update is over; the next rollout has begun
        pids = run.wait_for(lambda: engine_pids(run), what="the engines' pids")
        os.kill(pids[0], signal.SIGKILL)
        done = run.wait().check()
    assert sorted(done.series("train/loss")) == [0, 1, 2]
    assert done.series("rollout/engine_restarts")[2] >= 1.0
    assert set(done.series("contract/weight_digest_verified").values()) == {1.0}
    assert done.series("rollout/weight_version/mean")[2] == 3.0


def test_the_only_engine_killed_is_brought_back_to_the_current_version(flags, launch):
    argv = flags(
        num_rollout=2, rollout_max_response_len=100, custom_rm_path="tests.helpers.rewards.slow_even_token_share"
    )
    with launch(argv) as run:
        run.wait_for_step(0, "perf/step_time")
        os.kill(run.wait_for(lambda: engine_pids(run), what="the engine's pid")[0], signal.SIGKILL)
        done = run.wait().check()
    assert done.series("rollout/weight_version/mean") == {0: 1.0, 1: 2.0}


def test_a_dead_trainer_rank_ends_the_run_with_its_name(flags, launch):
    with launch(flags(num_rollout=50)) as run:
        run.wait_for_step(0)
        pids = trainer_pids(run)
        os.kill(pids[-1], signal.SIGKILL)
        killed = time.monotonic()
        done = run.wait(60)
    assert done.returncode == 1
    assert time.monotonic() - killed < 40
    assert "trainer rank" in done.output and "died" in done.output
    assert processes_of(run.run_dir) == []


def test_interrupt_ends_every_process(flags, launch):
    with launch(flags(num_rollout=50)) as run:
        run.wait_for_step(0)
        run.process.send_signal(signal.SIGINT)
        done = run.wait(60)
    assert done.returncode == 130
    assert processes_of(run.run_dir) == []


def test_a_killed_driver_leaves_no_process(flags, launch):
    with launch(flags(num_rollout=50)) as run:
        run.wait_for_step(0)
        engines = engine_pids(run)
        run.process.kill()
        run.process.wait()
    deadline = time.monotonic() + 90  # Ray's own agents look for their parent now and then
    while time.monotonic() < deadline and processes_of(run.run_dir):
        time.sleep(0.5)
    assert engines
    assert processes_of(run.run_dir) == []


def test_a_reward_that_always_raises_stops_the_run_with_its_message(flags, launch):
    done = launch(flags(custom_rm_path="tests.helpers.rewards.broken")).wait(120)
    assert done.returncode == 1
    assert "the verifier is broken" in done.output


def test_a_reward_that_fails_once_is_retried_and_never_scored_zero(flags, launch):
    done = launch(flags(custom_rm_path="tests.helpers.rewards.fails_for_odd_indices")).wait().check()
    assert sorted(done.series("train/loss")) == [0, 1, 2]


def test_a_missing_gpu_is_told_within_seconds(flags, launch):
    started = time.monotonic()
    done = launch(flags(train_device="cuda", train_backend="fsdp")).wait(60)
    assert done.returncode != 0
    assert "GPU" in done.output
    assert time.monotonic() - started < 45
