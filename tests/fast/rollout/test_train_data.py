"""The trainer's door: columns, and batches that are not let through."""

from __future__ import annotations

import re

import numpy as np
import pytest

from miles.backends.training_utils.columns import check_columns
from miles.rollout.postprocess import BatchError, postprocess_rollout
from miles.rollout.train_data import TrainDataError, convert_samples_to_train_data
from miles.utils.imports import register_function
from miles.utils.types import Sample, SampleStatus, VersionSpan
from tests.fast.rollout.fakes import make_args


def finished(index, reward=1.0, response=3, group=0, **fields):
    sample = Sample(
        index=index, group_index=group, prompt="p", tokens=[1, 2], reward=reward, status=SampleStatus.COMPLETED
    )
    ids = list(range(10, 10 + response))
    sample.append_response(ids, log_probs=[-0.5] * response, trainable=True, spans=[VersionSpan(3, 0, response)])
    for name, value in fields.items():
        setattr(sample, name, value)
    return sample


def args(**overrides):
    return make_args("", **{"rollout_batch_size": 1, "n_samples_per_prompt": 2, "global_batch_size": 2, **overrides})


# ---- conversion ----------------------------------------------------------------------------------------------------


def test_columns_have_one_entry_a_sample_and_the_trainers_dtypes():
    samples = [finished(0, 1.0), finished(1, 0.0, response=5, status=SampleStatus.TRUNCATED)]
    columns = convert_samples_to_train_data(args(), samples)
    check_columns(columns)
    assert all(len(column) == 2 for column in columns.values())
    assert [c.dtype for name in ("tokens", "loss_masks", "rollout_log_probs") for c in columns[name]] == (
        [np.int32] * 4 + [np.float32] * 2
    )
    assert columns["response_lengths"] == [3, 5]
    assert columns["total_lengths"] == [5, 7]
    assert columns["raw_reward"] == [1.0, 0.0]
    assert columns["rewards"] == pytest.approx([0.7071, -0.7071], abs=1e-4)
    assert columns["truncated"] == [0, 1]
    assert columns["sample_indices"] == columns["rollout_ids"] == [0, 1]
    assert columns["version_spans"] == [[(3, 0, 3)], [(3, 0, 5)]]
    assert "teacher_log_probs" not in columns


def test_a_removed_sample_trains_on_nothing_but_counts_in_the_baseline():
    samples = [finished(0, 1.0), finished(1, 0.0, remove_sample=True)]
    columns = convert_samples_to_train_data(args(), samples)
    assert [int(mask.sum()) for mask in columns["loss_masks"]] == [3, 0]
    assert columns["rewards"][0] > 0


def test_siblings_of_one_execution_share_its_mask_sum():
    samples = [finished(0, rollout_id=7), finished(0, rollout_id=7, response=5), finished(1, 0.0)]
    columns = convert_samples_to_train_data(args(), samples)
    assert columns["rollout_ids"] == [7, 7, 1]
    assert columns["rollout_mask_sums"] == [8, 8, 3]


def test_raw_reward_and_reward_key():
    samples = [finished(0, {"acc": 1.0, "len": 3}, metadata={"raw_reward": 9.0}), finished(1, {"acc": 0.0, "len": 3})]
    columns = convert_samples_to_train_data(args(reward_key="acc"), samples)
    assert columns["raw_reward"] == [9.0, 0.0]
    with pytest.raises(TrainDataError, match=r"sample 0: reward is \{'acc'.*set --reward-key"):
        convert_samples_to_train_data(args(), samples)


def test_every_broken_sample_is_refused_by_its_index():
    samples = [
        finished(0, loss_mask=[1, 1]),
        finished(1, rollout_log_probs=[0.0]),
        finished(2, version_spans=[VersionSpan(1, 2, 9)]),
        finished(3, rollout_routed_experts=np.zeros((3, 1, 1), np.int32)),
        finished(4, loss_mask=[1, 2, 0]),
        finished(5, rollout_log_probs=[float("nan"), 0.0, 0.0]),
        finished(6, tokens=[1, 2, 3, -4, 5]),
        finished(7, tokens=[1, 2, 3], response_length=3),
        Sample(index=8, tokens=[1], reward=0.0),
        finished(9),
    ]
    with pytest.raises(TrainDataError) as error:
        convert_samples_to_train_data(args(), samples)
    text = str(error.value)
    assert text.startswith("9 problems")
    assert [f"sample {i}: " in text for i in range(10)] == [True] * 9 + [False]


def test_an_engine_score_of_a_token_that_does_not_train_may_be_anything():
    sample = finished(0, rollout_log_probs=[0.0, float("nan"), 0.0], loss_mask=[1, 0, 1])
    assert len(convert_samples_to_train_data(args(), [sample])["tokens"]) == 1
    sample.loss_mask = [1, 1, 1]
    with pytest.raises(TrainDataError, match=r"sample 0: rollout_log_probs .* at tokens that train"):
        convert_samples_to_train_data(args(), [sample])


def test_routes_travel_as_layers_with_experts_in_the_smallest_type(model_dir):
    replay = args(use_rollout_routing_replay=True, hf_checkpoint=model_dir)  # 2 layers, the first dense; 2 of 8 experts
    whole = np.stack([np.zeros((4, 2), np.int64), np.arange(8).reshape(4, 2)], axis=1)
    samples = [
        finished(0, rollout_routed_experts=whole),
        finished(1, rollout_routed_experts=whole[:, 1:].astype(np.int32)),
        finished(2, rollout_routed_experts=None),
    ]
    routes = convert_samples_to_train_data(replay, samples)["rollout_routed_experts"]
    assert routes[0].dtype == np.uint8 and routes[0].tolist() == routes[1].tolist() == whole[:, 1:].tolist()
    assert routes[2] is None
    unknown = whole[:, 1:].copy()
    unknown[2] = -1  # no route for this token
    routes = convert_samples_to_train_data(replay, [*samples, finished(3, rollout_routed_experts=unknown)])[
        "rollout_routed_experts"
    ]
    assert [None if r is None else r.dtype for r in routes] == [np.int8, np.int8, None, np.int8]
    assert routes[3].tolist() == unknown.tolist()
    assert "rollout_routed_experts" not in convert_samples_to_train_data(args(), samples), "nobody would use them"


def test_routes_of_another_model_are_refused_by_sample(model_dir):
    good = np.arange(8).reshape(4, 1, 2)
    broken = {
        0: (good + 1, r"token 3 in layer 1 goes to experts \[7, 8\]"),
        1: (np.where(good == 4, -1, good), r"token 2 in layer 1 goes to experts \[-1, 5\]"),
        2: (np.zeros((4, 1, 3), int), r"shape \[4, 1, 3\], not \[tokens - 1, 1 layers with experts, 2 experts\]"),
        3: (good / 2, "type float64"),
        4: (np.zeros((4, 1, 2), int), "one of them twice"),
    }
    samples = [finished(i, rollout_routed_experts=routes) for i, (routes, _) in broken.items()] + [finished(9)]
    with pytest.raises(TrainDataError) as error:
        convert_samples_to_train_data(args(use_rollout_routing_replay=True, hf_checkpoint=model_dir), samples)
    for i, (_, message) in broken.items():
        assert re.search(f"sample {i}: rollout_routed_experts: .*{message}", str(error.value)), message


@pytest.mark.parametrize("reward", [None, float("nan"), float("inf"), "good"])
def test_a_reward_that_is_no_number_is_refused(reward):
    with pytest.raises(TrainDataError, match="sample 1: reward is"):
        convert_samples_to_train_data(args(), [finished(0), finished(1, reward)])


def test_optional_fields_are_all_or_none_whichever_sample_comes_first():
    for position in (0, 1):
        samples = [finished(0), finished(1, 0.0), finished(2, 0.0)]
        samples[position].rollout_log_probs = None
        with pytest.raises(
            TrainDataError, match=rf"rollout_log_probs: 2 samples have it, 1 lack it \(samples {position}\)"
        ):
            convert_samples_to_train_data(args(), samples)
    samples = [finished(i, rollout_log_probs=None) for i in range(2)]
    assert "rollout_log_probs" not in convert_samples_to_train_data(args(), samples)


def test_hooks_replace_rewards_and_the_whole_conversion():
    register_function("test.rewards", lambda args, samples: ([5.0] * len(samples), [0.5] * len(samples)))
    columns = convert_samples_to_train_data(
        args(custom_reward_post_process_path="test.rewards"), [finished(0), finished(1)]
    )
    assert (columns["raw_reward"], columns["rewards"]) == ([5.0, 5.0], [0.5, 0.5])
    register_function("test.short", lambda args, samples: ([5.0], [0.5]))
    with pytest.raises(ValueError, match=r"test.short returned 1 raw and 1 rewards for 2"):
        convert_samples_to_train_data(args(custom_reward_post_process_path="test.short"), [finished(0), finished(1)])
    register_function("test.convert", lambda args, samples: {"tokens": len(samples)})
    hooked = args(custom_convert_samples_to_train_data_path="test.convert")
    assert convert_samples_to_train_data(hooked, [finished(0)]) == {"tokens": 1}


# ---- postprocessing ------------------------------------------------------------------------------------------------


def test_groups_are_flattened_in_order():
    groups = [[finished(0), finished(1)], [[finished(2, rollout_id=2), finished(2, rollout_id=2)], finished(3)]]
    samples, metadata = postprocess_rollout(args(global_batch_size=4), groups)
    assert [s.index for s in samples] == [0, 1, 2, 2, 3]
    assert metadata == {}
    assert postprocess_rollout(args(), [finished(0), finished(1)])[0][1].index == 1


def test_siblings_need_one_rollout_id():
    for ids in ((None, None), (1, 2), (1, None)):
        group = [[finished(0, rollout_id=ids[0]), finished(1, rollout_id=ids[1])]]
        with pytest.raises(BatchError, match="2 samples of one execution have rollout ids"):
            postprocess_rollout(args(global_batch_size=1), [group])


def test_a_batch_that_does_not_divide_shows_the_equation_and_is_never_cut():
    groups = [[finished(i) for i in range(5)]]
    with pytest.raises(BatchError, match=r"5 rollouts .*5 = 2 x --global-batch-size 2 \+ 1.*--rollout-batch-size 1"):
        postprocess_rollout(args(), groups)
    assert len(postprocess_rollout(args(allow_partial_train_step=True), groups)[0]) == 5
    samples, metadata = postprocess_rollout(args(use_dynamic_global_batch_size=True), groups)
    assert (len(samples), metadata) == (5, {"dynamic_global_batch_size": 5})
    columns = convert_samples_to_train_data(args(), samples, metadata)
    assert columns["dynamic_global_batch_size"] == 5


def test_rollouts_are_counted_not_samples_also_with_a_dynamic_batch_size():
    groups = [[[finished(0, rollout_id=0), finished(0, rollout_id=0)], [finished(1, rollout_id=1)]]]
    assert len(postprocess_rollout(args(), groups)[0]) == 3
    assert postprocess_rollout(args(use_dynamic_global_batch_size=True), groups)[1] == {"dynamic_global_batch_size": 2}


@pytest.mark.parametrize("status", [SampleStatus.ABORTED, SampleStatus.FAILED])
def test_samples_without_an_outcome_never_train(status):
    with pytest.raises(BatchError, match=f"sample 1 is {status.value}.*never train"):
        postprocess_rollout(args(), [[finished(0), finished(1, status=status)]])
    with pytest.raises(BatchError, match="sample 1 is completed with reward None"):
        postprocess_rollout(args(), [[finished(0), finished(1, None)]])


def test_an_empty_batch_is_an_error():
    with pytest.raises(BatchError, match="no samples"):
        postprocess_rollout(args(), [])
    with pytest.raises(BatchError, match="returned a str among its samples"):
        postprocess_rollout(args(), [["x"]])
