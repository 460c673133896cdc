"""What happens when a part dies, and that it is told and cleaned up."""

import os
import signal
import time

from tests.e2e.harness import processes_of


def engine_pids(run) -> list[int]:
    return [pid for pid, command in processes_of(str(run.run_dir)) if "embedded_engine.server" in command]


def server_pids(run) -> list[int]:
    """Engine servers are children of this run's Ray actors; their command line carries the run's log folder or not."""
    return engine_pids(run)


def test_an_engine_killed_in_mid_rollout_is_replaced_and_the_run_goes_on(flags, launch):
    argv = flags(
        num_rollout=3,
        rollout_num_gpus=2,
        rollout_max_response_len=200,
        custom_rm_path="tests.helpers.rewards.slow_even_token_share",
    )
    with launch(argv) as run:
        run.wait_for_step(0)
        pids = run.wait_for(lambda: engine_pids(run), what="the engines' pids")
        os.kill(pids[0], signal.SIGKILL)
        done = run.wait().check()
    assert sorted(done.series("train/loss")) == [0, 1, 2]
    assert done.series("rollout/engine_restarts")[2] >= 1.0
    assert set(done.series("contract/weight_digest_verified").values()) == {1.0}
    assert done.series("rollout/weight_version/mean")[2] == 3.0


def test_the_only_engine_killed_is_brought_back_to_the_current_version(flags, launch):
    argv = flags(
        num_rollout=2, rollout_max_response_len=200, custom_rm_path="tests.helpers.rewards.slow_even_token_share"
    )
    with launch(argv) as run:
        run.wait_for_step(0)
        os.kill(run.wait_for(lambda: engine_pids(run), what="the engine's pid")[0], signal.SIGKILL)
        done = run.wait().check()
    assert done.series("rollout/weight_version/mean") == {0: 1.0, 1: 2.0}


def test_a_dead_trainer_rank_ends_the_run_with_its_name(flags, launch):
    with launch(flags(num_rollout=50)) as run:
        run.wait_for_step(0)
        log = run.run_dir / "logs" / "trainer_1.log"
        assert log.exists()
        pids = [pid for pid, command in processes_of(str(run.run_dir)) if "TrainActor" in command]
        pids = pids or trainer_pids(run)
        os.kill(pids[-1], signal.SIGKILL)
        killed = time.monotonic()
        done = run.wait(60)
    assert done.returncode == 1
    assert time.monotonic() - killed < 40
    assert "trainer rank" in done.output and "died" in done.output
    assert processes_of(str(run.run_dir)) == []


def trainer_pids(run) -> list[int]:
    """Processes that hold the trainer's log open."""
    found = []
    for rank in (0, 1):
        target = os.path.realpath(run.run_dir / "logs" / f"trainer_{rank}.log")
        for pid in filter(str.isdigit, os.listdir("/proc")):
            try:
                if os.path.realpath(f"/proc/{pid}/fd/1") == target:
                    found.append(int(pid))
            except OSError:
                continue
    return found


def test_interrupt_ends_every_process(flags, launch):
    with launch(flags(num_rollout=50)) as run:
        run.wait_for_step(0)
        run.process.send_signal(signal.SIGINT)
        done = run.wait(60)
    assert done.returncode == 130
    assert processes_of(str(run.run_dir)) == []


def test_a_killed_driver_leaves_no_process(flags, launch):
    with launch(flags(num_rollout=50)) as run:
        run.wait_for_step(0)
        engines = engine_pids(run)
        run.process.kill()
        run.process.wait()
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline and (processes_of(str(run.run_dir)) or trainer_pids(run)):
        time.sleep(0.5)
    assert not [pid for pid in engines if os.path.exists(f"/proc/{pid}/exe")]
    assert trainer_pids(run) == []


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
