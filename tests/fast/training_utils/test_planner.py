import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from miles.backends.training_utils.backend import TrainParallelConfig
from miles.backends.training_utils.batching.bins import (
    balanced_bins_under_cap,
    first_fit_decreasing,
    karmarkar_karp,
    split_to_multiple,
)
from miles.backends.training_utils.batching.planner import plan_batches
from miles.backends.training_utils.batching.shards import split_train_data
from tests.fast.training_utils.toy import make_args, make_columns


def columns_of(lengths, rollout_ids=None):
    return dict(
        tokens=[[7] * n for n in lengths],
        total_lengths=lengths,
        response_lengths=[n - 1 for n in lengths],
        loss_masks=[[1] * (n - 1) for n in lengths],
        rollout_ids=list(range(len(lengths))) if rollout_ids is None else rollout_ids,
        rewards=[0.0] * len(lengths),
    )


@pytest.fixture
def model_dir(tmp_path):
    config = dict(hidden_size=8, num_hidden_layers=2, num_attention_heads=2, vocab_size=32, intermediate_size=16)
    (tmp_path / "config.json").write_text(json.dumps(config))
    return str(tmp_path)


# ---- properties -------------------------------------------------------------------------------------------------------

CASES = dict(
    lengths=st.lists(st.integers(2, 60), min_size=1, max_size=40),
    dp=st.integers(1, 5),
    siblings=st.integers(1, 3),
    per_step=st.integers(1, 8),
    cap=st.integers(20, 50),
    balance=st.sampled_from(["none", "data", "flops"]),
    dynamic=st.booleans(),
    micro=st.integers(1, 4),
    cp=st.integers(1, 2),
    group=st.integers(1, 3),
)


@settings(max_examples=150, deadline=None)
@given(**CASES)
def test_every_plan_keeps_its_promises(
    tmp_path_factory, lengths, dp, siblings, per_step, cap, balance, dynamic, micro, cp, group
):
    directory = tmp_path_factory.getbasetemp()
    config = dict(hidden_size=8, num_hidden_layers=2, num_attention_heads=2, vocab_size=32, intermediate_size=16)
    (directory / "config.json").write_text(json.dumps(config))
    rollout_ids = [i // siblings for i in range(len(lengths))]
    dynamic = dynamic or balance == "flops"
    args = make_args(
        global_batch_size=per_step,
        use_dynamic_batch_size=dynamic,
        max_tokens_per_gpu=cap if dynamic else None,
        micro_batch_size=micro,
        balance_data=balance == "data",
        balance_by_flops=balance == "flops",
        allow_partial_train_step=True,
        hf_checkpoint=str(directory),
    )
    parallel = TrainParallelConfig(dp, cp_size=cp, vpp_size=2 if group > 1 else 1, microbatch_group_size=group)
    plan = plan_batches(columns_of(lengths, rollout_ids), parallel, args)

    seen = []
    step_of_rollout = {}
    for number, step in enumerate(plan.steps):
        counts = {len(rank) for rank in step.ranks}
        assert len(step.ranks) == dp and len(counts) == 1, "equally many micro-batches on every rank"
        assert counts.pop() % group == 0, "whole pipeline groups"
        members = []
        for rank in step.ranks:
            for mb in rank:
                assert mb.indices, "never an empty micro-batch"
                size = sum(lengths[i] for i in mb.indices)
                if dynamic:
                    assert size <= cap * cp or len(mb.indices) == 1, "the cap is hard"
                else:
                    assert len(mb.indices) <= micro
                if mb.filler:
                    assert len(mb.indices) == 1
                else:
                    members += mb.indices
        for i in members:
            assert step_of_rollout.setdefault(rollout_ids[i], number) == number, "siblings stay in one step"
        assert step.num_rollouts == len({rollout_ids[i] for i in members}) <= per_step
        assert step.num_tokens == sum(lengths[i] - 1 for i in members)
        if dp * group <= len(members):
            assert not any(mb.filler for rank in step.ranks for mb in rank) or len(members) % (dp * group)
        seen += members
    assert sorted(seen) == list(range(len(lengths))), "every sample exactly once"
    assert plan.oversize == ([i for i, n in enumerate(lengths) if n > cap * cp] if dynamic else [])


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(1, 100), min_size=1, max_size=30), st.integers(50, 120))
def test_first_fit_decreasing_keeps_the_cap_and_never_needs_more_bins_than_first_fit(sizes, cap):
    bins = first_fit_decreasing(sizes, cap)
    assert sorted(i for b in bins for i in b) == list(range(len(sizes)))
    assert all(sum(sizes[i] for i in b) <= cap or len(b) == 1 for b in bins)
    # Two bins that would fit into one cannot both exist.
    loads = sorted(sum(sizes[i] for i in b) for b in bins)
    assert len(loads) < 2 or loads[0] + loads[1] > cap


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(1, 100), min_size=1, max_size=24), st.integers(1, 5))
def test_karmarkar_karp_partitions(weights, k):
    bins = karmarkar_karp(weights, k)
    assert len(bins) == k and sorted(i for b in bins for i in b) == list(range(len(weights)))
    loads = [sum(weights[i] for i in b) for b in bins]
    assert loads == sorted(loads, reverse=True)
    assert max(loads) - min(loads) <= max(weights), "differencing never leaves a gap above the largest item"
    weights = weights + [1] * (-len(weights) % k)
    equal = karmarkar_karp(weights, k, equal_count=True)
    assert {len(b) for b in equal} == {len(weights) // k}
    assert sorted(i for b in equal for i in b) == list(range(len(weights)))


def test_karmarkar_karp_balances_better_than_dealing():
    weights = [8, 7, 6, 5, 4]
    loads = [sum(weights[i] for i in b) for b in karmarkar_karp(weights, 2)]
    assert loads == [16, 14]  # the textbook example of the differencing method


def test_unequal_counts_are_refused_where_equal_ones_are_asked():
    with pytest.raises(ValueError, match="5 items do not divide into 2 bins"):
        karmarkar_karp([1, 1, 1, 1, 1], 2, equal_count=True)


def test_balancing_never_breaks_the_cap():
    """Balancing FLOPs alone would put 60 + 60 tokens into a bin of 100."""
    sizes = [60, 60, 50, 40, 40, 30]
    flops = [n * n for n in sizes]
    bins = balanced_bins_under_cap(sizes, flops, cap=100)
    assert all(sum(sizes[i] for i in b) <= 100 for b in bins)
    assert len(bins) <= len(first_fit_decreasing(sizes, 100))


def test_splitting_ends_at_singletons():
    assert sorted(map(sorted, split_to_multiple([[0, 1], [2]], [5.0, 4.0, 1.0], 3))) == [[0], [1], [2]]
    assert split_to_multiple([[0], [1], [2]], [1.0, 1.0, 1.0], 2) == [[0], [1], [2]]


# ---- single cases -----------------------------------------------------------------------------------------------------


def test_three_samples_over_two_ranks_train_with_one_filler():
    columns = make_columns(3, siblings=False)
    plan = plan_batches(columns, TrainParallelConfig(2), make_args(global_batch_size=3))
    assert plan.num_fillers == 1 and plan.metrics["rollout/batch/fillers"] == 1.0
    shards = split_train_data(columns, plan, rollout_id=5)
    assert [len(s.steps[0].micro_batches) for s in shards] == [2, 2]
    fillers = [f for shard in shards for f in shard.columns["fillers"]]
    assert sum(fillers) == 1
    trained = sum(sum(map(sum, shard.columns["loss_masks"])) for shard in shards)
    assert trained == sum(map(sum, columns["loss_masks"])) == plan.steps[0].num_tokens
    assert sum(map(sum, columns["loss_masks"])) > 0, "the batch itself was left alone"


def test_an_oversize_sample_goes_alone_and_is_counted(caplog):
    args = make_args(global_batch_size=3, use_dynamic_batch_size=True, max_tokens_per_gpu=10)
    plan = plan_batches(columns_of([25, 4, 5]), TrainParallelConfig(1), args)
    assert plan.oversize == [0] and plan.metrics["rollout/batch/samples_over_token_cap"] == 1.0
    assert sorted(sorted(mb.indices) for mb in plan.steps[0].ranks[0]) == [[0], [1, 2]]
    assert "0 (25 tokens)" in caplog.text


def test_steps_are_blocks_of_rollouts_and_a_tail_is_counted_or_trained():
    columns = columns_of([5] * 5, rollout_ids=[0, 0, 1, 2, 3])
    plan = plan_batches(columns, TrainParallelConfig(1), make_args(global_batch_size=3))
    assert [s.num_rollouts for s in plan.steps] == [3] and plan.dropped == [4]
    assert plan.metrics["rollout/batch/samples_dropped"] == 1.0
    plan = plan_batches(columns, TrainParallelConfig(1), make_args(global_batch_size=3, allow_partial_train_step=True))
    assert [s.num_rollouts for s in plan.steps] == [3, 1] and plan.dropped == []


def test_siblings_apart_in_the_batch_still_train_in_one_step():
    columns = columns_of([5] * 4, rollout_ids=[0, 1, 0, 1])
    plan = plan_batches(columns, TrainParallelConfig(1), make_args(global_batch_size=1))
    steps = [sorted(i for mb in step.ranks[0] for i in mb.indices) for step in plan.steps]
    assert steps == [[0, 2], [1, 3]]


def test_dynamic_global_batch_size_takes_what_there_is():
    columns = columns_of([5] * 7)
    args = make_args(use_dynamic_global_batch_size=True, global_batch_size=None)
    assert [s.num_rollouts for s in plan_batches(columns, TrainParallelConfig(1), args).steps] == [7]
    columns["dynamic_global_batch_size"] = 7
    assert [s.num_rollouts for s in plan_batches(columns, TrainParallelConfig(1), args).steps] == [7]


@pytest.mark.parametrize(
    ("lengths", "changes", "message"),
    [
        ([], {}, "no samples"),
        ([5, 5], dict(global_batch_size=4), "2 rollouts, fewer than --global-batch-size 4"),
        ([5], dict(global_batch_size=1, use_dynamic_batch_size=True), "--max-tokens-per-gpu"),
        ([5], dict(global_batch_size=1, balance_by_flops=True, hf_checkpoint="x"), "--use-dynamic-batch-size"),
    ],
)
def test_a_batch_that_fills_no_step_says_which_flag(lengths, changes, message):
    with pytest.raises(ValueError, match=message):
        plan_batches(columns_of(lengths), TrainParallelConfig(1), make_args(**changes))


def test_flops_mode_says_which_sizes_the_model_directory_lacks(tmp_path):
    args = make_args(
        global_batch_size=1,
        use_dynamic_batch_size=True,
        max_tokens_per_gpu=9,
        balance_by_flops=True,
        hf_checkpoint=str(tmp_path),
    )
    with pytest.raises(ValueError, match=r"config\.json"):
        plan_batches(columns_of([5]), TrainParallelConfig(1), args)
    (tmp_path / "config.json").write_text('{"hidden_size": 8}')
    with pytest.raises(ValueError, match="num_hidden_layers, num_attention_heads, vocab_size"):
        plan_batches(columns_of([5]), TrainParallelConfig(1), args)


def test_balancing_evens_out_the_ranks(model_dir):
    columns = columns_of([40, 38, 30, 9, 8, 7, 6, 5])
    base = dict(global_batch_size=8, use_dynamic_batch_size=True, max_tokens_per_gpu=40, hf_checkpoint=model_dir)

    def spread(**changes):
        plan = plan_batches(columns, TrainParallelConfig(2), make_args(**base, **changes))
        loads = [sum(columns["total_lengths"][i] for mb in rank for i in mb.indices) for rank in plan.steps[0].ranks]
        return max(loads) - min(loads)

    assert spread(balance_data=True) <= spread()


def test_shards_split_arrays_and_lists_and_keep_what_is_common():
    columns = columns_of([5, 6, 7, 8])
    columns["rewards"] = np.array([0.0, 1.0, 2.0, 3.0], dtype=np.float32)
    columns["dynamic_global_batch_size"] = 4
    plan = plan_batches(columns, TrainParallelConfig(2), make_args(global_batch_size=4))
    shards = split_train_data(columns, plan, rollout_id=9)
    assert sorted(float(r) for s in shards for r in s.columns["rewards"]) == [0.0, 1.0, 2.0, 3.0]
    for shard in shards:
        assert shard.rollout_id == 9 and shard.metadata["dynamic_global_batch_size"] == 4
        assert shard.steps[0].micro_batches == [[0], [1]]
        assert all(len(t) == n for t, n in zip(shard.columns["tokens"], shard.columns["total_lengths"], strict=True))


def test_a_column_of_another_length_is_named():
    columns = columns_of([5, 6])
    plan = plan_batches(columns, TrainParallelConfig(1), make_args(global_batch_size=2))
    columns["rewards"] = [0.0]
    with pytest.raises(ValueError, match="rewards has 1"):
        split_train_data(columns, plan, 0)
