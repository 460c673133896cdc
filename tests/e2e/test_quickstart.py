"""The quick start's promise: from generated assets, through the warm start, to a reward that rises by at least 0.3."""

import os
import shutil
import subprocess
import sys
from statistics import mean

import pytest

from tests.e2e.harness import REPO, Finished, processes_of


@pytest.fixture
def run_name():
    name = f"e2e-{os.getpid()}"
    yield name
    shutil.rmtree(REPO / "runs" / f"{name}-sft", ignore_errors=True)  # the warm start's own run folder


@pytest.mark.timeout(1200)
def test_the_quick_start_learns(tmp_path, run_name):
    run_dir = tmp_path / "run"
    env = os.environ | {
        "MILES_SCRIPT_PYTHON": sys.executable,
        "MILES_SCRIPT_ASSETS": str(tmp_path / "assets"),
        "MILES_SCRIPT_RUN_NAME": run_name,
    }
    recipe = ["bash", str(REPO / "recipes" / "quickstart.sh"), "--run-dir", str(run_dir), "--num-rollout", "25"]
    with open(tmp_path / "output", "wb") as out:
        done = subprocess.run(
            recipe, cwd=tmp_path, env=env, stdout=out, stderr=subprocess.STDOUT, timeout=1100, check=False
        )
    run = Finished(done.returncode, (tmp_path / "output").read_text(errors="replace"), run_dir).check()

    rewards = list(run.series("rollout/raw_reward").values())
    assert len(rewards) == 25
    assert 0.2 < rewards[0] < 0.5, "the warm start imitates demonstrations of which most are wrong"
    assert mean(rewards[-3:]) - mean(rewards[:3]) >= 0.3, rewards
    held_out = run.series("eval/held_out")
    assert held_out[24] - held_out[0] >= 0.3, held_out
    for metric in ("contract/token_exact_ratio", "contract/version_coverage", "contract/weight_digest_verified"):
        assert set(run.series(metric).values()) == {1.0}, metric
    assert max(run.series("train/train_rollout_logprob_abs_diff").values()) < 1e-4
    for name in ("plan.json", "reward.png", "metrics.jsonl"):
        assert (run_dir / name).stat().st_size > 0, name
    assert str(run_dir) in run.output.splitlines()[-1], "the last line says where the plot is"
    assert processes_of(str(tmp_path)) == []
