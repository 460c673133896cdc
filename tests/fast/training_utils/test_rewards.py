import statistics

import numpy as np
import pytest

from miles.backends.training_utils.loss_hub.rewards import (
    normalize_group_rewards,
    normalize_rewards,
    post_process_rewards,
)
from miles.utils.imports import register_function
from miles.utils.types import Sample
from tests.fast.training_utils.toy import make_args


def samples_of(rewards, groups=None, rollout_ids=None):
    return [
        Sample(
            index=i,
            reward=r,
            group_index=None if groups is None else groups[i],
            rollout_id=None if rollout_ids is None else rollout_ids[i],
        )
        for i, r in enumerate(rewards)
    ]


def normalized(rewards, groups, rollout_ids=None, **changes):
    args = make_args(n_samples_per_prompt=changes.pop("n", 4), **changes)
    samples = samples_of(rewards, groups, rollout_ids)
    return normalize_rewards(args, samples, rewards)


def test_groups_are_centred_and_scaled_written_out():
    rewards, groups = [1.0, 0.0, 0.0, 1.0, 3.0, 7.0, 5.0, 9.0], [0, 0, 0, 0, 1, 1, 1, 1]
    expected = []
    for group in (rewards[:4], rewards[4:]):
        mean, std = statistics.mean(group), statistics.stdev(group)
        expected += [(r - mean) / (std + 1e-6) for r in group]
    assert normalized(rewards, groups) == pytest.approx(expected)


def test_interleaved_groups_are_found_by_their_index():
    assert normalized([1.0, 10.0, 3.0, 30.0], [0, 1, 0, 1], grpo_std_normalization=False) == [-1.0, -10.0, 1.0, 10.0]


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        (dict(grpo_std_normalization=False), [1.0, -1.0]),
        (dict(rewards_normalization=False), [3.0, 1.0]),
        (dict(advantage_estimator="reinforce_plus_plus"), [3.0, 1.0]),
        (dict(advantage_estimator="reinforce_plus_plus_baseline"), [1.0, -1.0]),
        (dict(n=1), [1.0, -1.0]),
    ],
)
def test_flags_and_estimators_choose_the_steps(changes, expected):
    assert normalized([3.0, 1.0], [0, 0], **changes) == pytest.approx(expected)


@pytest.mark.parametrize("count", [3, 7, 8])
@pytest.mark.parametrize("reward", [0.95, 0.1, -3.3, 1e6, 0.0])
def test_constant_rewards_give_exactly_zero(count, reward):
    assert normalized([reward] * count, [0] * count) == [0.0] * count
    noisy = [float(np.float32(reward) * np.float32(1 + k * 6e-8)) for k in range(count)]
    assert normalized(noisy, [0] * count) == [0.0] * count, "noise of fp32 rounding is no signal"


def test_small_but_real_differences_are_kept():
    assert normalized([1.0, 1.001], [0, 0]) != [0.0, 0.0]
    assert normalized([1e-7, 2e-7], [0, 0], grpo_std_normalization=False) == pytest.approx([-5e-8, 5e-8])


def test_a_lone_sample_has_advantage_zero():
    assert normalized([5.0], [0]) == [0.0]


def test_executions_count_once_and_share():
    """Execution 0 yields three samples: the group's mean is that of its two executions."""
    got = normalized([1.0, 1.0, 1.0, 3.0], [0] * 4, [0, 0, 0, 1], grpo_std_normalization=False)
    assert got == [-1.0, -1.0, -1.0, 1.0]


def test_siblings_that_disagree_are_an_error():
    with pytest.raises(ValueError, match=r"execution 0 have rewards 1\.0 and 2\.0"):
        normalized([1.0, 2.0, 3.0], [0] * 3, [0, 0, 1])


def test_groups_without_an_index_are_runs_or_everything():
    args = make_args(n_samples_per_prompt=2, grpo_std_normalization=False)
    rewards = [1.0, 3.0, 10.0, 30.0]
    assert normalize_rewards(args, samples_of(rewards), rewards) == [-1.0, 1.0, -10.0, 10.0]
    args.n_samples_per_prompt = 3
    assert normalize_rewards(args, samples_of(rewards), rewards) == [-10.0, -8.0, -1.0, 19.0]


def test_a_missing_reward_enters_no_mean():
    got = normalize_group_rewards([1.0, None, 3.0], [0, 0, 0], [0, 1, 2], divide_by_std=False)
    assert got == [-1.0, 0.0, 1.0]
    got = normalize_group_rewards([None, 4.0, None], [0, 0, 0], [0, 1, 2], divide_by_std=True)
    assert got == [0.0, 0.0, 0.0], "one reward has no deviation"


def test_a_missing_reward_that_would_train_is_refused():
    samples = samples_of([1.0, None], [0, 0])
    with pytest.raises(ValueError, match=r"samples \[1\] have no reward"):
        normalize_rewards(make_args(), samples, [1.0, None])
    samples[1].remove_sample = True
    assert normalize_rewards(make_args(), samples, [1.0, None]) == [0.0, 0.0]


def test_the_hook_replaces_it_all_and_must_return_one_each():
    register_function("tests.post", lambda args, samples: ([1.0, 2.0], [10.0, 20.0]))
    args = make_args(custom_reward_post_process_path="tests.post")
    assert post_process_rewards(args, samples_of([0.0, 0.0])) == ([1.0, 2.0], [10.0, 20.0])
    with pytest.raises(ValueError, match="2 raw and 2 rewards for 1 samples"):
        post_process_rewards(args, samples_of([0.0]))


def test_the_reward_key_selects():
    samples = samples_of([{"a": 1.0, "b": 5.0}, {"a": 3.0, "b": 5.0}], [0, 0])
    raw, rewards = post_process_rewards(make_args(reward_key="a", grpo_std_normalization=False), samples)
    assert raw == [1.0, 3.0] and rewards == [-1.0, 1.0]
