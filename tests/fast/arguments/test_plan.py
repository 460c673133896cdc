"""The plan that --dry-run prints."""

from __future__ import annotations

import io
import json

import pytest

from miles.arguments.plan import build_plan, render_plan, write_plan

from .conftest import write_checkpoint, write_model


def rendered(plan) -> str:
    out = io.StringIO()
    render_plan(plan, file=out)
    return out.getvalue()


def test_placement_numbers_bundles_trainer_first(make):
    plan = build_plan(make(rollout_num_gpus=2, actor_cpus_per_rank=2))
    assert plan["placement"]["needs"] == "4 CPUs"
    processes = plan["placement"]["processes"]
    assert processes["trainer rank 1"] == "CPU bundle 1, 2 threads"
    assert processes["engine 1"] == "CPU bundle 3"


def test_colocated_processes_share_bundles(make):
    plan = build_plan(make(colocate=True, rollout_num_gpus=None))
    assert plan["placement"]["needs"] == "2 CPUs"
    assert plan["placement"]["processes"]["engine 0"] == "CPU bundle 0, shared with the trainer"


@pytest.mark.parametrize(
    ("num_rollout", "changes", "said"),
    [
        (10, {}, "10, goes on with rollout 4 (the first is 0)"),
        (4, {}, "4, all done: raise --num-rollout to go on"),
    ],
)
def test_a_resumed_run_says_where_it_goes_on(make, tmp_path, num_rollout, changes, said):
    write_checkpoint(tmp_path / "ckpt", 3)
    plan = build_plan(make(load=str(tmp_path / "ckpt"), num_rollout=num_rollout, **changes))
    assert plan["run"]["rollouts"] == said


def test_half_runs_place_only_their_half(make):
    processes = build_plan(make(debug_rollout_only=True))["placement"]["processes"]
    assert "engine 0" in processes and "trainer rank 0" not in processes
    assert "weight update coordinator" not in processes


def test_the_batch_equation(make):
    assert (
        build_plan(make(global_batch_size=4))["batch"]["equation"] == "4 prompts x 2 samples = 8 = 4 a step x 2 steps"
    )


def test_contracts_say_what_this_run_does(make):
    plan = build_plan(make(driver="train.py", use_tis=True, tis_clip=3.0))
    contracts = plan["contracts"]
    assert set(contracts) == {"same tokens", "same routes", "same log-probs", "same weight version"}
    assert "importance weights within [0, 3]" in contracts["same log-probs"]["kept by"]
    assert contracts["same routes"]["kept by"] == "a dense model: there are no routes"
    assert "the update before it" in contracts["same weight version"]["kept by"]


def test_one_step_overlap_is_one_update_behind(make):
    kept = build_plan(make(driver="train_async.py"))["contracts"]["same weight version"]["kept by"]
    assert "at most one update old" in kept


def test_a_moe_model_without_replay_is_not_glossed_over(make, tmp_path):
    moe = write_model(tmp_path / "moe", num_experts=4)
    kept = build_plan(make(hf_checkpoint=str(moe)))["contracts"]["same routes"]["kept by"]
    assert kept.startswith("not kept: the trainer routes to its 4 experts by itself")


def test_training_alone_has_no_contracts_to_keep(make):
    plan = build_plan(
        make(
            rollout_function_path="miles.rollout.sft_rollout.generate_rollout",
            loss_type="sft_loss",
            compute_advantages_and_returns=False,
            debug_train_only=True,
            rollout_num_gpus=None,
        )
    )
    assert plan["rollout"]["engine"] == "none"
    assert "no engine takes part" in plan["contracts"]["same tokens"]["kept by"]
    assert plan["weight update"] == {"updates": "none: engines and trainer do not meet in this run"}


def test_warnings_are_part_of_the_plan(make):
    assert "--max-tokens-per-gpu has no effect" in rendered(build_plan(make(max_tokens_per_gpu=64)))


def test_the_printed_plan_has_every_section_and_process(make):
    text = rendered(build_plan(make(actor_num_gpus_per_node=64)))
    for section in ("placement", "batch", "trainer", "rollout", "weight update", "contracts", "hooks", "files"):
        assert section in text
    assert "engine 0" in text and "more" in text, "many ranks are cut short, the last process is shown"


def test_the_written_plan_is_json_with_every_flag_and_no_secret(make):
    args = make(use_wandb=True, wandb_key="s3cret", wandb_mode="offline")
    path = write_plan(build_plan(args), args)
    assert path.name == "plan.json" and str(path.parent) == args.run_dir
    text = path.read_text()
    plan = json.loads(text)
    assert plan["flags"]["rollout_batch_size"] == 4
    assert plan["given"]["--wandb-key"] == "(hidden)"
    assert "s3cret" not in text
