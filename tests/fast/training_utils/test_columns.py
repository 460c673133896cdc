import numpy as np
import pytest
import torch

from miles.backends.training_utils.backend import StepPlan, TrainParallelConfig, TrainShard
from miles.backends.training_utils.batching.planner import plan_batches
from miles.backends.training_utils.batching.shards import split_train_data
from miles.backends.training_utils.columns import ColumnError, MicroBatch, check_columns
from miles.backends.training_utils.loss_hub.reducers import StepTotals, get_sum_of_sample_mean
from miles.backends.training_utils.rollout_metrics import rollout_data_metrics
from miles.backends.training_utils.scoring import plan_scoring
from miles.utils.types import VersionSpan
from tests.fast.training_utils.toy import make_args, make_columns, num_rollouts, reduce_over


def test_good_columns_pass():
    check_columns(make_columns(reference=True))
    check_columns(
        {**make_columns(), "version_spans": [[VersionSpan(1, 0, n)] for n in make_columns()["response_lengths"]]}
    )


def test_every_field_that_disagrees_is_named_at_once():
    columns = make_columns(4, siblings=False)
    columns["tokens"][0] = columns["tokens"][0][:-1]
    columns["loss_masks"][1] = columns["loss_masks"][1] + [1]
    columns["rollout_log_probs"][2] = columns["rollout_log_probs"][2][:-1]
    columns["version_spans"][3] = [(0, 2, 1)]
    columns["rollout_routed_experts"] = [np.zeros((n, 2, 1)) for n in columns["total_lengths"]]
    with pytest.raises(ColumnError) as error:
        check_columns(columns)
    message = str(error.value)
    for text in (
        "sample 0: ",
        "sample 1: loss_masks has",
        "sample 2: rollout_log_probs has",
        "sample 3: version 0 spans [2, 1)",
        "sample 0: rollout_routed_experts has",
    ):
        assert text in message


def test_missing_columns_are_named():
    with pytest.raises(ColumnError, match="tokens, total_lengths, loss_masks"):
        check_columns({"response_lengths": [1]})


def test_a_response_without_a_prompt_is_refused():
    columns = dict(tokens=[[1, 2]], total_lengths=[2], response_lengths=[2], loss_masks=[[1, 1]])
    with pytest.raises(ColumnError, match="a prompt needs at least one"):
        check_columns(columns)


def test_a_long_list_of_problems_is_cut():
    count = 30
    columns = dict(
        tokens=[[1]] * count, total_lengths=[5] * count, response_lengths=[1] * count, loss_masks=[[1]] * count
    )
    with pytest.raises(ColumnError, match="and 10 more"):
        check_columns(columns)


def test_a_micro_batch_takes_its_samples_in_order_and_as_float32():
    columns = make_columns(4, siblings=False)
    columns["rollout_log_probs"] = [np.asarray(x, dtype=np.float64) for x in columns["rollout_log_probs"]]
    batch = MicroBatch.from_columns(make_args(), columns, [2, 0])
    assert batch.response_lengths == [columns["response_lengths"][i] for i in (2, 0)]
    flat = batch.flat("rollout_log_probs")
    assert flat.dtype == torch.float32 and len(flat) == sum(batch.response_lengths)
    assert batch.flat("teacher_log_probs") is None
    assert [x.tolist() for x in batch.split(batch.mask)] == [
        [float(m) for m in columns["loss_masks"][i]] for i in (2, 0)
    ]
    assert batch.per_sample(batch.mask).tolist() == [float(sum(columns["loss_masks"][i])) for i in (2, 0)]


def test_denominators_default_to_the_samples_own_tokens():
    columns = make_columns(3, siblings=False)
    del columns["rollout_mask_sums"]
    batch = MicroBatch.from_columns(make_args(), columns, [0, 1, 2])
    assert batch.rollout_mask_sums == [float(sum(m)) for m in columns["loss_masks"]]


def test_the_public_reducer():
    masks = [torch.tensor([1.0, 0.0, 1.0]), torch.tensor([1.0])]
    x = torch.tensor([1.0, float("nan"), 3.0, 10.0])
    assert get_sum_of_sample_mean([5, 2], [3, 1], masks)(x).item() == 2.0 + 10.0
    assert get_sum_of_sample_mean([5, 2], [3, 1], masks, True)(x).item() == 14.0
    assert get_sum_of_sample_mean([5, 2], [3, 1], masks, rollout_mask_sums=[3, 3])(x).item() == pytest.approx(14 / 3)
    with pytest.raises(ValueError, match=r"samples \[1\]"):
        get_sum_of_sample_mean([5, 2], [3, 2], masks)
    with pytest.raises(ValueError, match=r"got \(3,\) values for 4 response tokens"):
        get_sum_of_sample_mean([5, 2], [3, 1], masks)(x[:3])


def test_normalizers():
    totals = StepTotals(num_rollouts=4, num_tokens=100)
    assert totals.normalizer(make_args()) == 4 and totals.normalizer(make_args(calculate_per_token_loss=True)) == 100
    assert StepTotals(0, 0).normalizer(make_args()) == 1


# ---- rollout metrics --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("per_token", [False, True])
def test_rollout_metrics_do_not_depend_on_ranks_and_ignore_fillers(per_token):
    columns = make_columns(7)
    args = make_args(global_batch_size=num_rollouts(columns), calculate_per_token_loss=per_token)

    def over(dp):
        plan = plan_batches(columns, TrainParallelConfig(dp), args)
        return reduce_over([rollout_data_metrics(args, shard) for shard in split_train_data(columns, plan, 0)])

    one, three = over(1), over(3)
    assert one.pop("rollout/batch/fillers") == 0 and three.pop("rollout/batch/fillers") == 2
    assert one["rollout/batch/samples_dropped"] == 0
    assert one == pytest.approx(three, rel=1e-6)
    assert one["rollout/rewards"] == pytest.approx(sum(columns["rewards"]) / 7)
    assert one["rollout/response_lengths"] == pytest.approx(sum(columns["response_lengths"]) / 7)
    sums = {}
    for values, mask, rollout in zip(columns["log_probs"], columns["loss_masks"], columns["rollout_ids"], strict=True):
        sums.setdefault(rollout, []).extend(v for v, m in zip(values, mask, strict=True) if m)
    if per_token:
        every = [v for vs in sums.values() for v in vs]
        expected = sum(every) / len(every)
    else:
        expected = sum(sum(v) / len(v) for v in sums.values()) / len(sums)
    assert one["rollout/log_probs"] == pytest.approx(expected, rel=1e-5)


def test_correct_samples_apart():
    columns = make_columns(5, siblings=False)
    columns["raw_reward"] = [1.0, 0.0, 1.0, 0.0, 0.5]
    args = make_args(global_batch_size=5, log_correct_samples=True)
    plan = plan_batches(columns, TrainParallelConfig(2), args)
    got = reduce_over([rollout_data_metrics(args, shard) for shard in split_train_data(columns, plan, 0)])
    assert got["rollout/correct_response_lengths"] == sum(columns["response_lengths"][i] for i in (0, 2)) / 2
    means = []
    for i in (0, 2):
        kept = [v for v, m in zip(columns["log_probs"][i], columns["loss_masks"][i], strict=True) if m]
        means.append(sum(kept) / len(kept))
    assert got["rollout/correct_log_probs"] == pytest.approx(sum(means) / 2, rel=1e-6)


# ---- scoring ----------------------------------------------------------------------------------------------------------


def shard_of(steps, **columns):
    return TrainShard(0, dict(columns), [StepPlan([[0]], 1, 1)] * steps)


@pytest.mark.parametrize(
    ("steps", "changes", "expected"),
    [
        (1, {}, (False, False, True)),
        (2, {}, (True, False, False)),
        (1, dict(use_kl_loss=True), (False, True, True)),
        (1, dict(kl_coef=0.1), (True, True, False)),
        (1, dict(use_opd=True), (True, False, False)),
        (1, dict(keep_old_actor=True), (True, False, False)),
        (1, dict(skip_actor_forward_only=True), (False, False, True)),
        (1, dict(loss_type="sft_loss"), (False, False, False)),
        (1, dict(loss_type="custom_loss"), (True, False, False)),
        (2, dict(loss_type="custom_loss", compute_advantages_and_returns=False), (False, False, False)),
    ],
)
def test_passes_before_training(steps, changes, expected):
    plan = plan_scoring(make_args(**changes), shard_of(steps))
    assert (plan.policy, plan.reference, plan.old_is_current) == expected


def test_dropout_or_given_log_probs_change_the_passes():
    plan = plan_scoring(make_args(), shard_of(1), deterministic_forward=False)
    assert plan.policy and not plan.old_is_current
    plan = plan_scoring(make_args(), shard_of(2, log_probs=[[0.0]]))
    assert not plan.policy and not plan.old_is_current


@pytest.mark.parametrize(
    ("steps", "changes", "columns", "deterministic", "message"),
    [
        (2, {}, {}, True, "2 optimizer steps"),
        (1, dict(kl_coef=0.1), {}, True, "--kl-coef"),
        (1, {}, dict(log_probs=[[0.0]]), True, "brings log_probs"),
        (1, {}, {}, False, "dropout"),
    ],
)
def test_skipping_the_scoring_pass_where_it_would_be_wrong_is_refused(steps, changes, columns, deterministic, message):
    args = make_args(skip_actor_forward_only=True, **changes)
    with pytest.raises(ValueError, match=message):
        plan_scoring(args, shard_of(steps, **columns), deterministic_forward=deterministic)
