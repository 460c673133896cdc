"""Whole runs on real SGLang: Ray, one server on the CPU, two trainer ranks, verified updates."""

import pytest

from tests.e2e.harness import processes_of


@pytest.fixture
def sglang_flags(flags, sglang_python):
    def build(**changes) -> list[str]:
        return flags(**{"rollout_engine": "sglang", "sglang_python": sglang_python, "num_rollout": 2} | changes)

    return build


def test_two_steps_train_verify_and_leave_nothing_behind(sglang_flags, launch):
    run = launch(sglang_flags()).wait(600).check()
    assert sorted(run.series("train/loss")) == [0, 1]
    assert list(run.series("rollout/weight_version/mean").values()) == [1.0, 2.0]
    assert list(run.series("rollout/weight_version/published").values()) == [2.0, 3.0]
    for contract in ("weight_digest_verified", "token_exact_ratio", "version_coverage"):
        assert set(run.series(f"contract/{contract}").values()) == {1.0}, contract
    assert max(run.series("train/train_rollout_logprob_abs_diff").values()) < 1e-4
    assert processes_of(run.run_dir) == []


def test_updates_meet_requests_under_one_step_overlap(sglang_flags, launch):
    """The batch after the next is being generated when an update comes: its tokens carry the versions of both sides."""
    argv = sglang_flags(
        num_rollout=4, rollout_max_response_len=200, rollout_function_path="tests.helpers.rollouts.Ahead"
    )
    run = launch(argv, driver="train_async.py").wait(600).check()
    assert sorted(run.series("train/loss")) == [0, 1, 2, 3]
    assert list(run.series("rollout/weight_version/published").values()) == [2.0, 3.0, 4.0, 5.0]
    mixed = run.series("rollout/weight_version/mixed_version_ratio")
    assert mixed[0] == mixed[1] == 0.0 and mixed[2] > 0.5 and mixed[3] > 0.5, mixed
    assert run.series("rollout/weight_version/min")[3] == 2.0 and run.series("rollout/staleness/gen_mean")[3] > 0.5
    for contract in ("weight_digest_verified", "token_exact_ratio", "version_coverage"):
        assert set(run.series(f"contract/{contract}").values()) == {1.0}, contract
    # Tokens of an older version are scored by newer weights; the batches without any are scored exactly.
    assert run.series("train/train_rollout_logprob_abs_diff")[0] < 1e-4
    assert processes_of(run.run_dir) == []


def test_whole_checkpoints_from_disk_by_a_transport_of_the_users_own(sglang_flags, launch):
    transport = "tests.helpers.disk_transport.WholeCheckpoint"
    run = launch(sglang_flags(update_weight_transfer_mode=transport)).wait(600).check()
    assert list(run.series("rollout/weight_version/mean").values()) == [1.0, 2.0]
    assert set(run.series("contract/weight_digest_verified").values()) == {1.0}
    assert max(run.series("train/train_rollout_logprob_abs_diff").values()) < 1e-4


def test_an_option_that_sglang_lacks_is_refused_before_anything_starts(sglang_flags, launch):
    done = launch(sglang_flags(sglang_torchao_config="int8wo", sglang_attention_backend="nonsense")).wait(120)
    assert done.returncode == 2
    assert "--sglang-torchao-config is no option of SGLang" in done.output
    assert "--sglang-attention-backend nonsense" in done.output and "torch_native" in done.output
