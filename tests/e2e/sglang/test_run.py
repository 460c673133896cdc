"""A whole run on real SGLang: Ray, one server on the CPU, two trainer ranks, verified broadcast updates over gloo."""

import pytest

from tests.e2e.harness import processes_of


@pytest.fixture
def sglang_flags(flags, sglang_python):
    def build(**changes) -> list[str]:
        return flags(rollout_engine="sglang", sglang_python=sglang_python, num_rollout=2, **changes)

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


def test_an_option_that_sglang_lacks_is_refused_before_anything_starts(sglang_flags, launch):
    done = launch(sglang_flags(sglang_torchao_config="int8wo", sglang_attention_backend="nonsense")).wait(120)
    assert done.returncode == 2
    assert "--sglang-torchao-config is no option of SGLang" in done.output
    assert "--sglang-attention-backend nonsense" in done.output and "torch_native" in done.output
