"""Optimizer steps: gradients, losses, metrics, hooks."""

from types import SimpleNamespace

import pytest
import torch

from miles.backends.training_utils.finite import NonFiniteError
from miles.utils.imports import ImportPathError
from tests.benchmarks import gradient_invariance as invariance
from tests.fast.fsdp_utils import jobs
from tests.fast.fsdp_utils.jobs import make_args, make_batch


def test_gradients_are_those_of_the_loss_written_out_however_the_batch_is_split(world, solo, models):
    """The benchmark of the same name measures every family; here one dense and its split over ranks."""
    batch, model = invariance.make_batch(), models["qwen3"]
    exact = invariance.reference_gradients(model, batch, dtype="float64", padded=False)
    first = None
    for ranks, size, layout in ((solo, 12, "thd"), (world, 2, "thd"), (world, 1, "bshd")):
        args = invariance.make_args(model, qkv_format=layout, micro_batch_size=size)
        ours = ranks.run(invariance.trainer_gradients, args, batch)[0]
        first = first or ours
        assert invariance.of_whole(ours, exact) < 1e-6
        assert invariance.of_whole(ours, first) < 1e-6
        assert invariance.by_tensor(ours, first) < 2e-6  # single tensors are nearer to fp32's rounding


def test_per_token_loss_divides_by_the_trained_tokens_of_all_ranks(world, models):
    batch, model = invariance.make_batch(), models["qwen3"]
    tokens = sum(sum(mask) for mask in batch["loss_masks"])
    # The written-out loss divides by 11 rollouts too.
    exact = invariance.reference_gradients(
        model, batch | {"rollout_mask_sums": [tokens / 11] * 12}, dtype="float64", padded=False
    )
    args = invariance.make_args(model, calculate_per_token_loss=True)
    assert invariance.of_whole(world.run(invariance.trainer_gradients, args, batch)[0], exact) < 1e-6


def test_three_samples_train_on_two_ranks_as_on_one(world, solo, models):
    data = {name: column[:3] for name, column in make_batch().items()}
    args = make_args(models["qwen3"], global_batch_size=3, rollout_batch_size=3, n_samples_per_prompt=1)
    args.max_tokens_per_gpu = 30
    one, two = solo.run(jobs.train, args, [data])[0], world.run(jobs.train, args, [data])[0]
    a, b = one["metrics"][0][0], two["metrics"][0][0]
    assert all(a[k] == pytest.approx(b[k], rel=1e-4, abs=1e-6) for k in a if "fillers" not in k)


def test_two_runs_are_equal_bit_for_bit_on_every_rank(world, models):
    args = make_args(models["qwen3_moe"], global_batch_size=4, use_kl_loss=True, kl_loss_coef=0.1)
    batches = [make_batch(0), make_batch(1)]
    one, other = world.run(jobs.train, args, batches, with_ref=True)
    again, _ = world.run(jobs.train, args, batches, with_ref=True)
    assert one["metrics"] == again["metrics"] == other["metrics"]
    assert all(torch.equal(t, again["weights"][n]) for n, t in one["weights"].items())
    assert [len(steps) for steps in one["metrics"]] == [2, 2]


def test_the_same_batch_trains_to_the_same_weights_on_one_rank_and_on_two(world, solo, models):
    args, batches = make_args(models["qwen3"], lr=1e-3), [make_batch(0), make_batch(1)]
    two, one = world.run(jobs.train, args, batches)[0], solo.run(jobs.train, args, batches)[0]
    for name, tensor in one["weights"].items():
        torch.testing.assert_close(two["weights"][name], tensor, atol=2e-5, rtol=1e-3)
    for a, b in zip(one["metrics"], two["metrics"], strict=True):
        assert a[0].keys() == b[0].keys()
        assert all(a[0][k] == pytest.approx(b[0][k], rel=1e-4, abs=1e-6) for k in a[0])


def test_log_probs_of_good_samples_rise_and_of_bad_ones_fall(world, models):
    gains = world.run(gain_of_training, make_args(models["qwen3"]))
    for good, bad in gains:
        assert good > 0.5 and bad < -0.5


def gain_of_training(args):
    backend, _ = jobs.make_backend(args)
    shard = jobs.shard_of(backend, make_batch())
    before = backend.score(shard, "actor")
    backend.train(jobs.shard_of(backend, make_batch()))
    after = backend.score(shard, "actor")
    gains = [float((b - a).sum()) for a, b in zip(before, after, strict=True)]
    rewards = shard.columns["rewards"]
    return sum(g for g, r in zip(gains, rewards, strict=True) if r > 0), sum(
        g for g, r in zip(gains, rewards, strict=True) if r < 0
    )


def test_metrics_of_a_first_on_policy_step(world, models):
    args = make_args(models["qwen3"], use_kl_loss=True, kl_loss_coef=0.1, lr=0.003)
    (steps,) = world.run(jobs.train, args, [make_batch()], with_ref=True)[0]["metrics"]
    (step,) = steps
    assert step["train/ppo_kl"] == step["train/pg_clipfrac"] == step["train/kl_loss"] == 0.0
    assert step["train/ess_ratio"] == 1.0 and step["train/lr-pg_0"] == 0.003 and step["train/grad_norm"] > 0
    assert step["rollout/log_probs"] == pytest.approx(step["rollout/ref_log_probs"], abs=1e-7)
    assert step["rollout/raw_reward"] == 0.5
    assert 0 < step["train/train_rollout_logprob_abs_diff"] < step["train/train_rollout_logprob_abs_diff_max"]


def times_of(args, data):
    backend, _ = jobs.make_backend(args, with_ref=True)
    return backend.train(jobs.shard_of(backend, data))[-1]


def test_times_are_reported_for_each_part_and_are_the_same_on_every_rank(world, models):
    args = make_args(models["qwen3"], use_kl_loss=True, kl_coef=0.1)
    one, other = world.run(times_of, args, make_batch())
    parts = {"data_preprocess", "log_probs", "ref_log_probs", "actor_train"}
    assert {f"perf/{part}_time" for part in parts} <= one.keys()
    assert {f"perf/{part}_tflops" for part in parts - {"data_preprocess"}} <= one.keys()
    assert "perf/actor_train_mfu" not in one  # nobody knows the peak of this CPU
    assert one["perf/actor_train_tok_per_s"] > 0 and one == other


def test_several_steps_start_from_log_probs_before_the_first(world, models):
    """The second step is off policy: its ratio is against the weights that the batch started from."""
    args = make_args(models["qwen3"], global_batch_size=4)
    first, second = world.run(jobs.train, args, [make_batch()])[0]["metrics"][0]
    assert first["train/ppo_kl"] == 0.0
    assert second["train/ppo_kl"] != 0.0
    assert "rollout/log_probs" in second and "rollout/log_probs" not in first


def test_reusing_the_training_pass_for_old_log_probs_changes_nothing(world, models):
    plain = world.run(jobs.train, make_args(models["qwen3"]), [make_batch()])[0]
    # A hook that looks at the batch makes the trainer score it first.
    hooked = make_args(models["qwen3"], rollout_data_postprocess_path="tests.fast.fsdp_utils.test_training.look")
    scored = world.run(jobs.train, hooked, [make_batch()])[0]
    assert plain["metrics"] == scored["metrics"]
    assert all(torch.equal(t, scored["weights"][n]) for n, t in plain["weights"].items())


def look(args, rollout_id, rollout_data):
    assert rollout_id == 0
    assert {"tokens", "advantages", "returns", "log_probs"} <= rollout_data.keys()


def no_advantage(args, rollout_id, rollout_data):
    rollout_data["advantages"] = [a * 0 for a in rollout_data["advantages"]]


def test_a_postprocess_hook_may_change_the_batch_before_it_trains(world, models):
    path = "tests.fast.fsdp_utils.test_training.no_advantage"
    args = make_args(models["qwen3"], rollout_data_postprocess_path=path)
    (step,) = world.run(jobs.train, args, [make_batch()])[0]["metrics"][0]
    assert step["train/grad_norm"] == 0.0


def test_a_hook_that_does_not_exist_is_refused_when_the_trainer_loads(world, models):
    args = make_args(models["qwen3"], rollout_data_postprocess_path="tests.fast.nothing.here")
    with pytest.raises(ImportPathError, match=r"tests\.fast.*nothing"):
        world.run(jobs.train, args, [])


def halve(args, *, pg_loss, loss_masks, **batch):
    """A custom correction: half the weight for every token."""
    assert {"train_log_probs", "rollout_log_probs", "total_lengths", "response_lengths"} <= batch.keys()
    return pg_loss * 0.5, loss_masks, {"halved": torch.full_like(pg_loss, 0.5)}


def test_entropy_and_corrections_reach_the_loss(world, models):
    path = "tests.fast.fsdp_utils.test_training.halve"
    fields = {"use_tis": True, "custom_tis_function_path": path, "use_rollout_entropy": True, "entropy_coef": 0.01}
    plain = world.run(jobs.train, make_args(models["qwen3"]), [make_batch()])[0]["metrics"][0][0]
    step = world.run(jobs.train, make_args(models["qwen3"], **fields), [make_batch()])[0]["metrics"][0][0]
    assert step["train/halved"] == pytest.approx(0.5)
    assert step["train/entropy_loss"] == pytest.approx(step["rollout/entropy"]) == pytest.approx(5.77, abs=0.02)
    assert step["train/loss"] == pytest.approx(step["train/pg_loss"] - 0.01 * step["train/entropy_loss"])
    assert step["train/grad_norm"] == pytest.approx(plain["train/grad_norm"] / 2, rel=0.01)


def test_sft_lowers_the_loss_of_what_it_is_shown(world, models):
    args = make_args(models["qwen3"], loss_type="sft_loss", rollout_temperature=0.5)
    data = make_batch()
    metrics = world.run(jobs.train, args, [data] * 6)[0]["metrics"]
    losses = [steps[0]["train/loss"] for steps in metrics]
    assert losses == sorted(losses, reverse=True) and losses[-1] < losses[0] - 1
    assert losses[0] == pytest.approx(5.78, abs=0.1)  # near log(320): the untrained model knows nothing


def sum_of_squares(args, batch, logits, sum_of_sample_mean):
    """A custom loss: half the mean squared logit at the positions that predict the response."""
    rows, start = [], 0
    flat = logits.flatten(0, 1)
    for total, response in zip(batch["total_lengths"], batch["response_lengths"], strict=True):
        rows.append(flat[start + total - response - 1 : start + total - 1].square().mean(-1))
        start += total if logits.shape[0] == 1 else logits.shape[1]
    loss = 0.5 * sum_of_sample_mean(torch.cat(rows))
    return loss, {"doubled": 2 * loss.detach()}


@pytest.mark.parametrize("layout", ["thd", "bshd"])
def test_a_custom_loss_gets_logits_at_every_position(world, models, layout):
    path = "tests.fast.fsdp_utils.test_training.sum_of_squares"
    args = make_args(models["qwen3"], loss_type="custom_loss", custom_loss_function_path=path, qkv_format=layout)
    metrics = world.run(jobs.train, args, [make_batch()] * 3)[0]["metrics"]
    assert metrics[2][0]["train/loss"] < metrics[0][0]["train/loss"]
    assert metrics[0][0]["train/doubled"] == pytest.approx(2 * metrics[0][0]["train/loss"])


def poisoned_batch():
    data = make_batch()
    data["rewards"][0] = float("nan")
    return data


def train_expecting_no_step(args, data):
    """(the error or None, metrics or None, whether the weights stayed as they were)."""
    backend, _ = jobs.make_backend(args)
    before, error, metrics = jobs.weights_of(backend), None, None
    try:
        metrics = jobs.untimed(backend.train(jobs.shard_of(backend, data)))
    except NonFiniteError as raised:
        error = str(raised)
    after = jobs.weights_of(backend)
    return error, metrics, not backend.is_weight_source or all(torch.equal(before[n], after[n]) for n in before)


def test_a_step_that_is_not_finite_stops_the_run_with_the_weights_untouched(world, models):
    for error, _, same in world.run(train_expecting_no_step, make_args(models["qwen3"]), poisoned_batch()):
        assert same and "rollout 0, optimizer step 0" in error and "The step was not taken" in error
        assert "not finite are: sample 0 (advantages, returns)" in error, "the same on the rank that does not have it"


def test_or_is_skipped_and_counted_where_the_flag_says_so(world, models):
    args = make_args(models["qwen3"], check_for_nan_in_loss_and_grad=False)
    for _, metrics, same in world.run(train_expecting_no_step, args, poisoned_batch()):
        assert same and metrics[0]["train/nonfinite_steps"] == 1.0


@pytest.mark.parametrize("clip", [0.0, 1e-3])
def test_clipping_bounds_the_step_but_not_the_reported_norm(world, models, clip):
    norm, after = world.run(clipped_gradient_norm, make_args(models["qwen3"], clip_grad=clip))[0]
    assert norm > 0.1
    assert after == pytest.approx(norm if clip == 0 else clip, rel=1e-2)


def clipped_gradient_norm(args):
    from miles.backends.fsdp_utils.optimizer import clip_gradients

    backend, _ = jobs.make_backend(args)
    shard = jobs.shard_of(backend, make_batch())
    backend.runner._advantages(shard)
    backend.runner.accumulate_gradients(shard, shard.steps[0], old_is_current=True)
    norm = clip_gradients(backend.runner.params, args.clip_grad, backend.runner.shard_group)
    squares = [p.grad.full_tensor().square().sum() for p in backend.runner.params]
    return norm, float(torch.stack(squares).sum().sqrt())


@pytest.mark.parametrize(
    "fields",
    [{"gradient_checkpointing": True}, {"dp_replicate_size": 2}, {"fsdp_cpu_offload": True}, {"by_layer": True}],
    ids=lambda fields: next(iter(fields)),
)
def test_ways_to_save_memory_do_not_change_the_training(world, models, fields):
    by_layer = fields.pop("by_layer", False)
    batches = [make_batch(0), make_batch(1)]
    plain = world.run(jobs.train, make_args(models["qwen3_moe"], lr=1e-3), batches)[0]
    other = world.run(jobs.train, make_args(models["qwen3_moe"], lr=1e-3, **fields), batches, by_layer=by_layer)[0]
    for a, b in zip(plain["metrics"], other["metrics"], strict=True):
        assert all(a[0][k] == pytest.approx(b[0][k], rel=1e-4, abs=1e-6) for k in a[0])


@pytest.mark.parametrize("fields", [{"bf16": True}, {"fp16": True}, {"bf16": True, "keep_fp32_master": False}])
def test_low_precision_compute_stays_near_fp32(world, models, fields):
    exact = world.run(jobs.train, make_args(models["qwen3"], lr=1e-3), [make_batch()])[0]["metrics"][0][0]
    low = world.run(jobs.train, make_args(models["qwen3"], lr=1e-3, **fields), [make_batch()])[0]["metrics"][0][0]
    assert low["train/grad_norm"] == pytest.approx(exact["train/grad_norm"], rel=0.03)
    assert low["rollout/log_probs"] == pytest.approx(exact["rollout/log_probs"], rel=0.01)
    assert low["rollout/log_probs"] != exact["rollout/log_probs"]


def test_debug_train_data_is_written_by_every_rank(world, models, tmp_path):
    template = str(tmp_path / "train_{rollout_id}.pt")
    world.run(jobs.train, make_args(models["qwen3"], save_debug_train_data=template), [make_batch()])
    seen = []
    for rank in range(2):
        dump = torch.load(tmp_path / f"train_0_rank{rank}.pt", weights_only=False)
        assert dump["rollout_id"] == 0 and dump["rank"] == rank
        assert [len(x) for x in dump["columns"]["log_probs"]] == dump["columns"]["response_lengths"]
        assert {"advantages", "tokens", "rewards"} <= dump["columns"].keys()
        seen += dump["columns"]["sample_indices"]
    assert sorted(seen) == list(range(8))


def old_actor_scores(args):
    """Log-probs under the actor before each of three (train, publish) rounds, and under `old_actor` as each one trains."""
    backend, _ = jobs.make_backend(args)
    shard = jobs.shard_of(backend, make_batch())
    jobs.weights_of(backend)  # publishes
    actor, old = [], []
    for rollout_id in range(3):
        actor.append(torch.cat(backend.score(shard, "actor")))
        backend.train(jobs.shard_of(backend, make_batch(rollout_id), rollout_id))
        old.append(torch.cat(backend.score(shard, "old_actor")))
        jobs.weights_of(backend)
    return actor, old


@pytest.mark.parametrize(("driver", "made_by"), [("train.py", [0, 1, 2]), ("train_async.py", [0, 0, 1])])
def test_the_old_actor_is_the_policy_that_made_the_batch(world, models, driver, made_by):
    """Overlapped rollouts are started before the training step that precedes them is published."""
    args = make_args(models["qwen3"], keep_old_actor=True, driver=driver)
    for actor, old in world.run(old_actor_scores, args):
        assert not torch.equal(actor[0], actor[1]) and not torch.equal(actor[1], actor[2])
        assert [torch.equal(scores, actor[i]) for scores, i in zip(old, made_by, strict=True)] == [True] * 3


def reference_scores(args):
    backend, _ = jobs.make_backend(args, with_ref=True)
    shard = jobs.shard_of(backend, make_batch())
    result = [torch.cat(backend.score(shard, "ref"))]
    for rollout_id in range(2):
        backend.train(jobs.shard_of(backend, make_batch(), rollout_id))
        result.append(torch.cat(backend.score(shard, "ref")))
    return result, torch.cat(backend.score(shard, "actor"))


def test_the_reference_moves_to_the_actor_at_its_interval_only(world, models):
    for (start, one, two), actor in world.run(reference_scores, make_args(models["qwen3"], ref_update_interval=2)):
        assert torch.equal(start, one) and torch.equal(two, actor) and not torch.equal(one, two)


def test_weights_that_are_not_kept_are_refused_by_name(world, models):
    with pytest.raises(ValueError, match="'teacher': it has actor, ref and old_actor"):
        world.run(score_tag, make_args(models["qwen3"]), "teacher")
    with pytest.raises(ValueError, match="no reference model was loaded"):
        world.run(score_tag, make_args(models["qwen3"]), "ref")


def score_tag(args: SimpleNamespace, tag: str):
    backend, _ = jobs.make_backend(args)
    return backend.score(jobs.shard_of(backend, make_batch()), tag)


def test_fresh_moments_each_rollout_when_asked_for(world, models):
    batches = [make_batch(0), make_batch(1)]
    kept = world.run(jobs.train, make_args(models["qwen3"]), batches)[0]
    fresh = world.run(jobs.train, make_args(models["qwen3"], reset_optimizer_states=True), batches)[0]
    assert kept["metrics"][0] == fresh["metrics"][0]
    assert any(not torch.equal(t, fresh["weights"][n]) for n, t in kept["weights"].items())
