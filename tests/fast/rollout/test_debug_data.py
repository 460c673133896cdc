"""Saved rollouts: what was written is what is trained on later."""

from __future__ import annotations

import json

import numpy as np
import pytest

from miles.rollout.debug_data import DebugDataError, load_debug_rollout, save_debug_eval, save_debug_rollout
from miles.utils.types import Sample, SampleStatus, VersionSpan
from tests.fast.rollout.fakes import make_args


def samples(count=4):
    out = []
    for i in range(count):
        sample = Sample(
            index=i, group_index=i // 2, prompt="q", tokens=[1, 2], reward=0.5, status=SampleStatus.COMPLETED
        )
        sample.append_response([3, 4], log_probs=[-1.0, -2.0], trainable=True, spans=[VersionSpan(1, 0, 2)])
        sample.response, sample.rollout_routed_experts = "cd", np.arange(6).reshape(3, 1, 2)
        out.append(sample)
    return out


def test_a_saved_rollout_comes_back_field_by_field(tmp_path):
    template = str(tmp_path / "rollout" / "{rollout_id}.pt")
    save_debug_rollout(make_args("", save_debug_rollout_data=template), 3, samples())
    loaded = load_debug_rollout(make_args("", load_debug_rollout_data=template), 3)
    for before, after in zip(samples(), loaded, strict=True):
        assert np.array_equal(before.rollout_routed_experts, after.rollout_routed_experts)
        before.rollout_routed_experts = after.rollout_routed_experts = None
        assert before == after


def test_subsampling_keeps_whole_groups(tmp_path):
    template = str(tmp_path / "{rollout_id}.pt")
    save_debug_rollout(make_args("", save_debug_rollout_data=template), 0, samples(8))

    def load(ratio):
        args = make_args("", load_debug_rollout_data=template, load_debug_rollout_data_subsample=ratio)
        return [s.index for s in load_debug_rollout(args, 0)]

    assert load(0.5) == [0, 1, 2, 3]
    assert load(0.01) == [0, 1]
    with pytest.raises(DebugDataError, match="must be above 0"):
        load(0.0)


def test_trajectories_are_readable_lines_with_roles(tmp_path):
    args = make_args("", save_debug_trajectory_data=str(tmp_path / "{rollout_id}.jsonl"))
    save_debug_rollout(args, 1, samples(2))
    save_debug_eval(args, 1, {"aime": {"samples": samples(1)}})
    rows = [json.loads(line) for line in (tmp_path / "1.jsonl").read_text().splitlines()]
    assert rows[1]["index"] == 1
    assert rows[0]["messages"] == [{"role": "prompt", "content": "q"}, {"role": "assistant", "content": "cd"}]
    (row,) = [json.loads(line) for line in (tmp_path / "eval_1.jsonl").read_text().splitlines()]
    assert row["metadata"]["eval_dataset"] == "aime"


def test_trajectories_tell_what_the_environment_said(model_dir, tmp_path):
    sample = samples(1)[0]
    sample.append_response([5, 6], log_probs=None, trainable=False)
    sample.append_response([7], log_probs=[-1.0], trainable=True, spans=[VersionSpan(1, 0, 1)])
    args = make_args(model_dir, save_debug_trajectory_data=str(tmp_path / "{rollout_id}.jsonl"))
    save_debug_rollout(args, 0, [sample])
    (row,) = [json.loads(line) for line in (tmp_path / "0.jsonl").read_text().splitlines()]
    assert [m["role"] for m in row["messages"]] == ["prompt", "assistant", "environment", "assistant"]
    assert [len(m["content"]) for m in row["messages"]] == [1, 2, 2, 1]


def test_a_missing_or_foreign_file_is_named(tmp_path):
    args = make_args("", load_debug_rollout_data=str(tmp_path / "{rollout_id}.pt"))
    with pytest.raises(DebugDataError, match=r"9.pt does not exist \(rollout 9\)"):
        load_debug_rollout(args, 9)
    (tmp_path / "9.pt").write_text("hello")
    with pytest.raises(DebugDataError, match=r"9.pt is no saved rollout"):
        load_debug_rollout(args, 9)
    with pytest.raises(DebugDataError, match=r"only {rollout_id} can be filled in"):
        load_debug_rollout(make_args("", load_debug_rollout_data="{rank}.pt"), 0)
