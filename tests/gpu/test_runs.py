"""Whole runs on one GPU, through the driver: engines and trainer that take turns, and that share it in parts."""

import json
from importlib.util import find_spec

import pytest
import torch

from tests.e2e.harness import Run, processes_of
from tests.helpers.tiny_models import make_tiny_model

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
    pytest.mark.timeout(400),
]
ENGINES = [
    "embedded",
    pytest.param("sglang", marks=pytest.mark.skipif(find_spec("sglang") is None, reason="needs SGLang for a GPU")),
]
# Kernels that every build of SGLang has; what else is installed is not these tests' business.
SGLANG = [
    "--sglang-attention-backend=triton", "--sglang-sampling-backend=pytorch", "--sglang-grammar-backend=none",
    "--sglang-mem-fraction-static=0.5", "--sglang-max-total-tokens=50000", "--sglang-cuda-graph-max-bs-decode=32", "--sglang-cuda-graph-backend-prefill=disabled",
]  # fmt: skip


@pytest.fixture(scope="module")
def common(tmp_path_factory):
    """Flags of a two-step GRPO run on a tiny model."""
    folder = tmp_path_factory.mktemp("assets")
    model = make_tiny_model(
        folder / "model", hidden_size=256, intermediate_size=512, num_attention_heads=4, head_dim=64, dtype="bfloat16"
    )
    rows = [{"input": f"How many apples are {i} and {i + 1}?"} for i in range(32)]
    (folder / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return [
        "--hf-checkpoint", model, "--prompt-data", folder / "prompts.jsonl", "--num-rollout", 2, "--rollout-batch-size", 4,
        "--n-samples-per-prompt", 4, "--global-batch-size", 16, "--rollout-max-response-len", 24, "--lr", 1e-3,
        "--custom-rm-path", "tests.helpers.rewards.even_token_share", "--actor-num-gpus-per-node", 1,
    ]  # fmt: skip


def run(tmp_path, common, engine, *flags):
    own = SGLANG if engine == "sglang" else ["--embedded-max-total-tokens=50000"]
    argv = [str(x) for x in (*common, "--rollout-engine", engine, *own, *flags)]
    with Run(argv, tmp_path / "run") as started:
        return started.wait(380).check()


def assert_trained(done):
    assert sorted(done.series("train/loss")) == [0, 1]
    assert list(done.series("rollout/weight_version/mean").values()) == [1.0, 2.0]
    for contract in ("weight_digest_verified", "token_exact_ratio", "version_coverage"):
        assert set(done.series(f"contract/{contract}").values()) == {1.0}, contract
    assert max(done.series("train/train_rollout_logprob_abs_diff").values()) < 0.05
    assert processes_of(done.run_dir) == []


@pytest.mark.parametrize("engine", ENGINES)
def test_taking_turns(tmp_path, common, engine):
    done = run(tmp_path, common, engine, "--colocate", "--check-weight-update-equal")
    assert_trained(done)
    assert min(done.series("perf/wake_trainer_time").values()) > 0
    assert min(done.series("perf/resume_engines_time").values()) > 0


@pytest.mark.parametrize("engine", ENGINES)
def test_each_with_its_part_of_the_gpu(tmp_path, common, engine):
    parts = ["--gpus-per-rank", "0.5", "--rollout-num-gpus", "1"]
    done = run(tmp_path, common, engine, *parts)
    assert_trained(done)
    assert "perf/wake_trainer_time" not in {key for row in done.rows for key in row}


def test_one_step_overlap_on_parts_of_the_gpu(tmp_path, common):
    argv = [str(x) for x in (*common, "--rollout-engine", "embedded", "--embedded-max-total-tokens=50000")]
    argv += ["--gpus-per-rank", "0.5", "--rollout-num-gpus", "1"]
    with Run(argv, tmp_path / "run", "train_async.py") as started:
        done = started.wait(380).check()
    assert sorted(done.series("train/loss")) == [0, 1]
    assert set(done.series("contract/weight_digest_verified").values()) == {1.0}
