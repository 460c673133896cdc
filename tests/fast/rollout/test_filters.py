"""Dynamic filters on the shapes that groups and rewards come in."""

from __future__ import annotations

import numpy as np
import pytest

from miles.rollout.filter_hub.base_types import DynamicFilterOutput, call_dynamic_filter
from miles.rollout.filter_hub.dynamic_sampling_filters import check_no_aborted, check_reward_nonzero_std
from miles.utils.types import Sample, SampleStatus
from tests.fast.rollout.fakes import make_args

ARGS = make_args("")


def group(*rewards):
    return [Sample(index=i, reward=r, status=SampleStatus.COMPLETED) for i, r in enumerate(rewards)]


@pytest.mark.parametrize(
    ("rewards", "keep", "reason"),
    [
        ((1.0, 0.0), True, None),
        ((1.0, 1.0), False, "zero_std_1.0"),
        ((0.0, 0.0, 0.0), False, "zero_std_0.0"),
        ((0.95,) * 8, False, "zero_std_0.9"),
        ((0.1 + 0.2, 0.3), False, "zero_std_0.3"),
        ((1, 0), True, None),
        ((0.5,), False, "zero_std_0.5"),
    ],
)
def test_groups_without_a_difference_are_dropped(rewards, keep, reason):
    verdict = check_reward_nonzero_std(ARGS, group(*rewards))
    assert verdict.keep is keep
    if reason is not None:
        assert verdict.reason.startswith("zero_std_")
        assert abs(float(verdict.reason.removeprefix("zero_std_")) - rewards[0]) <= 0.051


def test_dict_rewards_go_by_reward_key():
    args = make_args("", reward_key="acc")
    assert check_reward_nonzero_std(args, group({"acc": 1, "x": 1}, {"acc": 0, "x": 1})).keep
    assert not check_reward_nonzero_std(args, group({"acc": 1, "x": 1}, {"acc": 1, "x": 0})).keep


def test_fanned_out_executions_count_once():
    first = [Sample(index=0, rollout_id=0, reward=1.0), Sample(index=0, rollout_id=0, reward=1.0)]
    assert check_reward_nonzero_std(ARGS, [first, [Sample(index=1, rollout_id=1, reward=0.0)]]).keep
    assert not check_reward_nonzero_std(ARGS, [first, [Sample(index=1, rollout_id=1, reward=1.0)]]).keep


def test_aborted_samples_are_found_at_any_depth():
    cut = Sample(status=SampleStatus.ABORTED)
    assert check_no_aborted(ARGS, group(1.0)).keep
    for shape in ([*group(1.0), cut], [group(1.0), [cut]]):
        assert check_no_aborted(ARGS, shape) == DynamicFilterOutput(keep=False, reason="group_has_aborted")


def test_a_filter_may_answer_with_a_bool_and_nothing_else():
    assert call_dynamic_filter(None, ARGS, []).keep
    assert not call_dynamic_filter(lambda args, group: False, ARGS, []).keep
    assert call_dynamic_filter(lambda args, group: np.bool_(True), ARGS, []).keep
    with pytest.raises(TypeError, match=r"--dynamic-sampling-filter-path: expected .* got NoneType"):
        call_dynamic_filter(lambda args, group: None, ARGS, [])
