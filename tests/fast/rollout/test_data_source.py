"""The stream of groups: order, epochs, indices, and state that continues exactly."""

from __future__ import annotations

import random

import pytest
import torch

from miles.rollout.data_source import (
    DataSourceStateError,
    RolloutDataSource,
    RolloutDataSourceWithBuffer,
    state_path,
)
from miles.utils.imports import register_function
from miles.utils.types import SampleStatus, VersionSpan
from tests.fast.rollout.fakes import make_args, prompt_rows, write_jsonl


def labels(groups):
    return [group[0].label for group in groups]


def test_a_data_set_smaller_than_a_batch_is_walked_several_times(run_args):
    source = RolloutDataSource(run_args(3))
    assert labels(source.get_samples(8)) == list("01201201")
    assert (source.epoch_id, source.sample_offset) == (2, 2)


def test_indices_are_monotonic_over_the_run(run_args):
    source = RolloutDataSource(run_args(3))
    groups = source.get_samples(2) + source.get_samples(5)
    assert [s.index for group in groups for s in group] == list(range(14))
    assert [group[0].group_index for group in groups] == list(range(7))


def test_samples_of_a_group_are_independent_copies(run_args):
    first, second = RolloutDataSource(run_args(3)).get_samples(1)[0]
    first.metadata["touched"] = True
    assert "touched" not in second.metadata


def test_every_epoch_has_its_own_order_from_the_seed_alone(run_args):
    def epochs(seed):
        source = RolloutDataSource(run_args(10, rollout_shuffle=True, rollout_seed=seed))
        return [labels(source.get_samples(10)) for _ in range(3)]

    random.seed(1)
    first = epochs(7)
    random.seed(2)
    state = random.getstate()
    assert epochs(7) == first, "the global random state must not matter"
    assert random.getstate() == state, "nor be touched"
    assert epochs(8) != first
    assert len({tuple(order) for order in first}) == 3
    assert all(sorted(order) == sorted(first[0]) for order in first)


@pytest.mark.parametrize("shuffle", [False, True])
def test_a_resumed_source_hands_out_what_an_uninterrupted_one_would(run_args, tmp_path, shuffle):
    args = run_args(7, rollout_shuffle=shuffle, save=str(tmp_path), load=str(tmp_path))
    source = RolloutDataSource(args)
    source.get_samples(4), source.get_samples(4)
    source.save(1)
    expected = source.get_samples(12)
    resumed = RolloutDataSource(args)
    resumed.load(1)
    assert resumed.get_samples(12) == expected


def test_the_recycle_buffer_is_saved_with_partial_samples(run_args, tmp_path):
    args = run_args(7, save=str(tmp_path), load=str(tmp_path))
    source = RolloutDataSourceWithBuffer(args)
    group = source.get_samples(3)[1]
    group[0].tokens, group[0].status = [5, 6], SampleStatus.ABORTED
    group[0].append_response([7], log_probs=[-0.5], trainable=True, spans=[VersionSpan(3, 0, 1)])
    group[0].metadata["start_rollout_id"] = 0
    source.add_samples([group])
    source.save(0)
    resumed = RolloutDataSourceWithBuffer(args)
    resumed.load(0)
    assert resumed.get_buffer_length() == 1
    assert resumed.get_samples(2) == source.get_samples(2)
    assert resumed.get_samples(0) == []


def test_the_buffer_comes_first_and_new_prompts_fill_up(run_args):
    source = RolloutDataSourceWithBuffer(run_args(9))
    groups = source.get_samples(3)
    source.add_samples([groups[2], groups[0]])
    assert labels(source.get_samples(4)) == ["2", "0", "3", "4"]
    assert source.get_buffer_length() == 0


def test_a_buffer_filter_chooses_and_must_remove_what_it_returns(run_args):
    def newest(args, rollout_id, buffer, num_samples):
        return [buffer.pop() for _ in range(min(num_samples, len(buffer)))]

    register_function("test.newest", newest)
    source = RolloutDataSourceWithBuffer(run_args(9, buffer_filter_path="test.newest"))
    groups = source.get_samples(3)
    source.add_samples(groups)
    assert labels(source.get_samples(2)) == ["2", "1"]
    register_function("test.keeps", lambda args, rollout_id, buffer, n: buffer[:n])
    source = RolloutDataSourceWithBuffer(run_args(9, buffer_filter_path="test.keeps"))
    source.add_samples(source.get_samples(1))
    with pytest.raises(ValueError, match=r"--buffer-filter-path test.keeps .*must remove what it returns"):
        source.get_samples(1)


def test_a_group_of_the_wrong_size_is_not_taken_back(run_args):
    source = RolloutDataSourceWithBuffer(run_args(3))
    with pytest.raises(ValueError, match="must hold 2 samples"):
        source.add_samples([source.get_samples(1)[0][:1]])


def test_missing_state_is_an_error_and_a_fresh_start_is_not(run_args, tmp_path):
    args = run_args(3, load=str(tmp_path))
    source = RolloutDataSource(args)
    source.load(-1)
    source.load(None)
    with pytest.raises(DataSourceStateError, match=r"global_dataset_state_dict_4.pt .*--start-rollout-id 0"):
        source.load(4)


def test_state_inside_a_checkpoint_folder_is_found(run_args, tmp_path):
    args = run_args(5, save=str(tmp_path / "iter_0000002"), load=str(tmp_path))
    source = RolloutDataSource(args)
    source.get_samples(3)
    source.save(2)
    resumed = RolloutDataSource(args)
    resumed.load(2)
    assert resumed.sample_offset == 3


def test_state_of_other_prompts_or_a_damaged_file_is_refused(model_dir, run_args, tmp_path):
    args = run_args(5, save=str(tmp_path), load=str(tmp_path))
    RolloutDataSource(args).save(0)
    other = make_args(model_dir, prompt_data=write_jsonl(tmp_path / "o.jsonl", prompt_rows(6)), load=str(tmp_path))
    with pytest.raises(DataSourceStateError, match="saved for other prompts"):
        RolloutDataSource(other).load(0)
    path = state_path(tmp_path, 0)
    path.write_bytes(path.read_bytes()[:50])
    with pytest.raises(DataSourceStateError, match="cannot be read"):
        RolloutDataSource(args).load(0)
    torch.save({"epoch_id": 1}, path)
    with pytest.raises(DataSourceStateError, match="lacks fingerprint"):
        RolloutDataSource(args).load(0)


def test_partial_groups_of_another_size_are_refused_on_resume(run_args, tmp_path):
    args = run_args(5, save=str(tmp_path), load=str(tmp_path))
    source = RolloutDataSourceWithBuffer(args)
    source.add_samples(source.get_samples(1))
    source.save(0)
    with pytest.raises(DataSourceStateError, match="1 unfinished groups of 2 samples"):
        RolloutDataSourceWithBuffer(run_args(5, load=str(tmp_path), n_samples_per_prompt=4)).load(0)


def test_without_a_global_data_set_samples_are_empty_but_numbered(model_dir):
    source = RolloutDataSource(make_args(model_dir, rollout_global_dataset=False))
    groups = source.get_samples(2)
    assert [s.prompt for group in groups for s in group] == [""] * 4
    assert [s.index for group in groups for s in group] == [0, 1, 2, 3]


def test_a_source_without_a_buffer_takes_nothing_back(run_args):
    source = RolloutDataSource(run_args(3))
    with pytest.raises(RuntimeError, match="RolloutDataSourceWithBuffer"):
        source.add_samples(source.get_samples(1))
