"""The Megatron trainer in whole runs on a CPU: parallel ranks, a broadcast from each pipeline stage, verified updates."""

import json
from pathlib import Path

import pytest

from tests.e2e.harness import processes_of
from tests.helpers.tiny_models import make_tiny_model

SMALL = {"train_backend": "megatron", "rollout_batch_size": 2, "global_batch_size": 8}


def note_save(args, rollout_id, checkpoint_dir, hf_checkpoint_dir):
    """What `--custom-megatron-post-save-hook-path` is told."""
    complete = (Path(checkpoint_dir) / "manifest.json").is_file()
    with open(Path(args.run_dir) / "saves.txt", "a") as file:
        file.write(f"{rollout_id} {Path(checkpoint_dir).name} {complete} {hf_checkpoint_dir}\n")


@pytest.mark.parametrize(
    "layout",
    [
        {"tensor_model_parallel_size": 2, "use_kl_loss": True, "kl_loss_coef": 0.1},
        pytest.param({"pipeline_model_parallel_size": 2}, marks=pytest.mark.nightly),
        pytest.param(
            {"expert_model_parallel_size": 2, "expert_tensor_parallel_size": 1, "use_distributed_optimizer": True},
            marks=pytest.mark.nightly,
        ),
    ],
    ids=["tp2", "pp2", "ep2"],
)
def test_three_steps_train_and_every_update_is_verified(flags, launch, tmp_path, layout):
    if "expert_model_parallel_size" in layout:
        layout = layout | {"hf_checkpoint": make_tiny_model(tmp_path / "moe", "qwen3_moe")}
    run = launch(flags(**SMALL | layout)).wait(600).check()
    assert sorted(run.series("train/loss")) == [0, 1, 2]
    assert list(run.series("rollout/weight_version/mean").values()) == [1.0, 2.0, 3.0]
    assert set(run.series("contract/weight_digest_verified").values()) == {1.0}
    assert set(run.series("contract/token_exact_ratio").values()) == {1.0}
    assert max(run.series("train/train_rollout_logprob_abs_diff").values()) < 1e-4
    assert "megatron" in json.dumps(json.loads((run.run_dir / "plan.json").read_text())["trainer"])
    assert processes_of(run.run_dir) == []


@pytest.mark.nightly
def test_a_resumed_run_equals_an_uninterrupted_one(flags, launch, tmp_path):
    options = SMALL | {"pipeline_model_parallel_size": 2, "use_distributed_optimizer": True, "save_interval": 1}
    hook = {"custom_megatron_post_save_hook_path": "tests.e2e.test_megatron.note_save"}
    whole = launch(flags(**options | hook | {"num_rollout": 2, "save": tmp_path / "s1"}), "whole").wait(600).check()
    told = (whole.run_dir / "saves.txt").read_text().splitlines()
    assert sorted(told) == 2 * ["0 iter_0000000 True None"] + 2 * ["1 iter_0000001 True None"]  # from both ranks
    launch(flags(**options | {"num_rollout": 1, "save": tmp_path / "s2"}), "parts").wait(600).check()
    resumed = options | {"num_rollout": 2, "save": tmp_path / "s2", "load": tmp_path / "s2"}
    parts = launch(flags(**resumed), "parts").wait(600).check()
    assert parts.reproducible_rows() == whole.reproducible_rows()
