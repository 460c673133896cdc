"""PPO with a critic that shares the trainer's ranks."""

from tests.e2e.harness import processes_of


def test_a_critic_trains_alone_then_with_the_policy_and_both_resume(flags, launch, tmp_path):
    ppo = dict(
        advantage_estimator="ppo",
        lambd=0.95,
        num_critic_only_steps=1,
        critic_lr=0.02,
        offload_train=True,
        save=tmp_path / "s",
        save_interval=2,
    )
    whole = launch(flags(num_rollout=3, **ppo), "whole").wait().check()
    assert sorted(whole.series("train/critic-value_loss")) == [0, 1, 2]
    assert sorted(whole.series("train/pg_loss")) == [1, 2], "the first rollout trains the critic alone"
    assert sorted(whole.series("rollout/values")) == [1, 2], "the policy's advantages come from the critic's values"
    assert all(v > 0 for v in whole.series("train/critic-grad_norm").values())
    assert set(whole.series("train/critic-lr-pg_0").values()) == {0.02}
    for turn in ("wake_critic", "sleep_critic", "critic_train"):
        assert sorted(whole.series(f"perf/{turn}_time")) == [0, 1, 2], turn
    assert {p.name for p in (tmp_path / "s_critic").glob("iter_*")} == {p.name for p in (tmp_path / "s").glob("iter_*")}
    assert processes_of(whole.run_dir) == []

    (tmp_path / "s" / "latest_checkpointed_iteration.txt").write_text("1\n")
    resumed = launch(flags(num_rollout=3, load=tmp_path / "s", **ppo), "resumed").wait().check()
    third = [row for row in whole.reproducible_rows() if row["step"] == 2]
    assert [row for row in resumed.reproducible_rows() if row["step"] == 2] == third
