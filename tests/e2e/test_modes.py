"""One-step overlap, debug modes, SFT, evaluation, exports, the sentinel."""

import json

import pytest

from tests.e2e.harness import processes_of
from tests.helpers.tiny_models import make_tiny_model


def test_one_step_overlap_trains_on_samples_one_update_old(flags, launch):
    run = launch(flags(num_rollout=4), driver="train_async.py").wait().check()
    assert sorted(run.series("train/loss")) == [0, 1, 2, 3]
    assert list(run.series("rollout/weight_version/mean").values()) == [1.0, 1.0, 2.0, 3.0]
    # Generated one version ago and aged by the update that came before it was trained.
    assert list(run.series("rollout/staleness/old_max").values()) == [0.0, 1.0, 1.0, 1.0]
    assert list(run.series("rollout/weight_version/published").values()) == [2.0, 3.0, 4.0, 5.0]


def test_a_colocated_run_takes_turns_and_passes_handles(flags, launch):
    """On a CPU there is no device memory to give back, but every turn is taken; each rank sends to the engine beside it."""
    turns = dict(colocate=True, offload=True, actor_num_gpus_per_node=2, rollout_num_gpus=None)
    run = launch(flags(update_weight_transfer_mode="ipc", eval_interval=None, **turns)).wait().check()
    assert sorted(run.series("train/loss")) == [0, 1, 2]
    assert list(run.series("rollout/weight_version/mean").values()) == [1.0, 2.0, 3.0]
    assert set(run.series("contract/weight_digest_verified").values()) == {1.0}
    for turn in ("release_engines", "wake_trainer", "sleep_trainer", "resume_engines"):
        assert sorted(run.series(f"perf/{turn}_time")) == [0, 1, 2], turn
    stages = {key.removeprefix("perf/startup/") for row in run.rows for key in row if key.startswith("perf/startup/")}
    assert stages == {"checks_s", "ray_s", "engines_s", "trainer_s", "first_update_s", "total_s"}
    assert processes_of(run.run_dir) == []


def test_async_resume_draws_the_same_prompts_again(flags, launch, tmp_path):
    options = dict(save=tmp_path / "s", save_interval=2, save_debug_rollout_data=tmp_path / "d" / "{rollout_id}.pt")
    launch(flags(num_rollout=2, **options), "a", driver="train_async.py").wait().check()
    launch(flags(num_rollout=4, load=tmp_path / "s", **options), "b", driver="train_async.py").wait().check()
    seen: list[int] = []
    for rollout_id in range(4):
        import torch

        data = torch.load(tmp_path / "d" / f"{rollout_id}.pt", weights_only=False)
        seen += [s["index"] for s in data["samples"]]
    assert seen == list(range(64))


def test_rollout_only_then_train_only_on_the_saved_data(flags, launch, tmp_path):
    template = tmp_path / "rollouts" / "{rollout_id}.pt"
    made = launch(flags(num_rollout=2, debug_rollout_only=True, save_debug_rollout_data=template), "made")
    made.wait().check()
    trained = launch(flags(num_rollout=2, load_debug_rollout_data=template), "trained").wait().check()
    assert sorted(trained.series("train/loss")) == [0, 1]
    again = launch(flags(num_rollout=2, load_debug_rollout_data=template), "again").wait().check()
    assert again.series("train/grad_norm") == trained.series("train/grad_norm")


def test_sft_lowers_the_loss_and_exports_a_model_that_serves(flags, launch, tmp_path):
    data = tmp_path / "sft.jsonl"
    rows = [
        {"messages": [{"role": "user", "content": f"{i}?"}, {"role": "assistant", "content": "yes yes yes"}]}
        for i in range(16)
    ]
    data.write_text("\n".join(map(json.dumps, rows)))
    export = tmp_path / "hf"
    run = launch(
        flags(
            prompt_data=data,
            input_key="messages",
            rollout_function_path="miles.rollout.sft_rollout.generate_rollout",
            loss_type="sft_loss",
            disable_compute_advantages_and_returns=True,
            debug_train_only=True,
            rollout_engine=None,
            n_samples_per_prompt=1,
            rollout_batch_size=16,
            global_batch_size=16,
            num_rollout=12,
            custom_rm_path=None,
            rollout_num_gpus=None,
            save_hf=export,
            save_interval=100,
        ),
        "sft",
    ).wait()
    losses = run.check().series("train/loss")
    assert losses[11] < 0.7 * losses[0]
    served = launch(flags(hf_checkpoint=export, num_rollout=1), "served").wait().check()
    assert max(served.series("train/train_rollout_logprob_abs_diff").values()) < 1e-4


def test_evaluation_only_and_with_training(flags, launch, prompts):
    evaluation = dict(eval_prompt_data=["apples", prompts], eval_interval=2, n_samples_per_eval_prompt=2)
    only = launch(flags(num_rollout=0, **evaluation), "only").wait().check()
    assert list(only.series("eval/apples")) == [0]
    both = launch(flags(num_rollout=2, **evaluation), "both").wait().check()
    assert len(both.series("eval/apples")) >= 2 or len([r for r in both.rows if "eval/apples" in r]) == 2


def test_sentinel_saves_out_of_turn_and_exit_after_rollout_stops(flags, launch, tmp_path):
    sentinel = tmp_path / "save-now"
    sentinel.touch()
    save = tmp_path / "ckpt"
    run = launch(
        flags(
            num_rollout=10,
            save=save,
            save_interval=100,
            save_trigger_sentinel=sentinel,
            debug_exit_after_rollout=1,
        )
    )
    run.wait().check()
    assert (save / "latest_checkpointed_iteration.txt").read_text().strip() == "0"
    assert not sentinel.exists()
    assert processes_of(run.run_dir) == []


def test_another_family_trains_and_its_metrics_reach_tensorboard_and_wandb(flags, launch, tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    run = launch(
        flags(
            hf_checkpoint=make_tiny_model(tmp_path / "qwen2", "qwen2"),
            num_rollout=2,
            use_tensorboard=True,
            use_wandb=True,
            wandb_mode="offline",
        )
    )
    run = run.wait().check()
    assert max(run.series("train/train_rollout_logprob_abs_diff").values()) < 1e-4
    events = EventAccumulator(str(run.run_dir / "tensorboard"))
    events.Reload()
    tags = set(events.Tags()["scalars"])
    assert {name for row in run.rows for name in row} - tags == {"_time", "step", "step_key"}
    for name in ("rollout/raw_reward", "train/loss", "perf/step_time", "perf/update_weights_time"):
        assert [(e.step, e.value) for e in events.Scalars(name)] == [
            (step, pytest.approx(value)) for step, value in run.series(name).items()
        ]
    assert list((run.run_dir / "wandb").glob("offline-run-*/*.wandb"))


def test_check_weight_update_equal_passes_on_a_real_run(flags, launch):
    run = launch(flags(num_rollout=1, check_weight_update_equal=True)).wait().check()
    assert "weight" in run.output.lower()
