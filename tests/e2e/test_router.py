"""A run whose requests go through the router process, which dies in between."""

import os
import signal

from tests.e2e.harness import processes_of


def test_a_run_goes_on_through_a_router_that_was_killed(flags, launch):
    """Dynamic sampling cuts rollouts off, so aborts pass through the router too."""
    argv = flags(
        num_rollout=3,
        rollout_num_gpus=2,
        rollout_max_response_len=60,
        use_miles_router=True,
        dynamic_sampling_filter_path="miles.rollout.filter_hub.dynamic_sampling_filters.check_reward_nonzero_std",
        over_sampling_batch_size=8,
        custom_rm_path="tests.helpers.rewards.slow_even_token_share",
    )
    with launch(argv) as run:
        run.wait_for_step(0, "perf/step_time")
        [router] = [pid for pid, command in processes_of(run.run_dir) if "miles.router.serve" in command]
        os.kill(router, signal.SIGKILL)
        done = run.wait().check()
    assert sorted(done.series("train/loss")) == [0, 1, 2]
    assert done.series("rollout/router_restarts")[2] == 1.0
    assert done.series("rollout/weight_version/mean") == {0: 1.0, 1: 2.0, 2: 3.0}
    assert processes_of(run.run_dir) == []
