"""The synchronous driver on real parts: Ray, an engine process, two FSDP ranks, verified broadcast updates."""

import pytest

from tests.e2e.harness import processes_of


@pytest.fixture(scope="module")
def shared():
    return {}


def test_three_steps_train_verify_and_leave_nothing_behind(flags, launch):
    run = launch(flags(num_rollout=3)).wait().check()
    assert sorted(run.series("train/loss")) == [0, 1, 2]
    assert list(run.series("rollout/weight_version/mean").values()) == [1.0, 2.0, 3.0]
    assert list(run.series("rollout/weight_version/published").values()) == [2.0, 3.0, 4.0]
    assert set(run.series("contract/weight_digest_verified").values()) == {1.0}
    assert set(run.series("contract/token_exact_ratio").values()) == {1.0}
    assert set(run.series("contract/version_coverage").values()) == {1.0}
    assert max(run.series("train/train_rollout_logprob_abs_diff").values()) < 1e-4
    for name in ("plan.json", "reward.png", "metrics.jsonl"):
        assert (run.run_dir / name).stat().st_size > 0, name
    assert processes_of(run.run_dir) == []


def test_equal_seeds_give_equal_metrics_and_other_seeds_do_not(flags, launch):
    first = launch(flags(num_rollout=2), "a").wait().check()
    second = launch(flags(num_rollout=2), "b").wait().check()
    assert first.reproducible_rows() == second.reproducible_rows()
    other = launch(flags(num_rollout=2, rollout_seed=7), "c").wait().check()
    assert first.series("rollout/raw_reward") != other.series("rollout/raw_reward")


def test_four_steps_equal_two_and_resume_and_two(flags, launch, tmp_path):
    options = dict(rollout_shuffle=True, n_samples_per_prompt=2, global_batch_size=8, kl_loss_coef=0.0)
    whole = launch(flags(num_rollout=4, save=tmp_path / "s1", save_interval=4, **options), "whole").wait().check()
    two = dict(save=tmp_path / "s2", save_interval=2)
    launch(flags(num_rollout=2, **two, **options), "parts").wait().check()
    resumed = launch(flags(num_rollout=4, load=tmp_path / "s2", **two, **options), "parts").wait().check()
    expected = [row for row in whole.reproducible_rows()]
    assert resumed.reproducible_rows() == expected
    nothing = launch(flags(num_rollout=4, load=tmp_path / "s2", **two, **options), "nothing").wait()
    assert nothing.returncode == 3 and "nothing is left to do" in nothing.output


def test_two_runs_on_one_host_leave_each_other_alone(flags, launch):
    one = launch(flags(num_rollout=2), "one")
    two = launch(flags(num_rollout=2, rollout_seed=5), "two")
    assert list(one.wait().check().series("rollout/weight_version/mean").values()) == [1.0, 2.0]
    assert list(two.wait().check().series("rollout/weight_version/mean").values()) == [1.0, 2.0]
