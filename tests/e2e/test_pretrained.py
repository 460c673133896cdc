"""A real pretrained model, from the package that carries it, through the recipe to an optimizer step."""

import os
import subprocess
import sys

import pytest

from tests.e2e.harness import REPO, Finished, processes_of


@pytest.mark.timeout(900)
def test_the_smollm2_recipe_trains(tmp_path):
    run_dir, model = tmp_path / "run", tmp_path / "model"
    env = os.environ | {"MILES_SCRIPT_PYTHON": sys.executable, "MILES_SCRIPT_MODEL": str(model)}
    subprocess.run(
        [sys.executable, str(REPO / "scripts" / "make_smollm2.py"), "--out", str(model)],
        env=env,
        timeout=300,
        check=True,
    )
    flags = {
        "--run-dir": run_dir,
        "--num-rollout": 1,
        "--rollout-batch-size": 2,
        "--n-samples-per-prompt": 2,
        "--global-batch-size": 4,
        "--rollout-max-response-len": 6,
        "--rollout-num-gpus": 1,
    }
    recipe = ["bash", str(REPO / "recipes" / "smollm2_135m_grpo.sh"), *(str(x) for pair in flags.items() for x in pair)]
    with open(tmp_path / "output", "wb") as out:
        done = subprocess.run(recipe, cwd=REPO, env=env, stdout=out, stderr=subprocess.STDOUT, timeout=800, check=False)
    run = Finished(done.returncode, (tmp_path / "output").read_text(errors="replace"), run_dir).check()

    for metric in ("contract/token_exact_ratio", "contract/version_coverage", "contract/weight_digest_verified"):
        assert set(run.series(metric).values()) == {1.0}, metric
    assert max(run.series("train/train_rollout_logprob_abs_diff").values()) < 1e-3
    assert len(run.series("train/grad_norm")) == 1
    assert processes_of(str(tmp_path)) == []
