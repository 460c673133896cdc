"""What a shard holds is what arrives, in few buffers."""

from __future__ import annotations

import pickle

import numpy as np
import pytest

from miles.backends.training_utils.backend import StepPlan, TrainShard
from miles.backends.training_utils.ragged import Ragged, pack, unpack

COLUMNS = {
    "tokens": [np.arange(n, dtype=np.int32) for n in (3, 0, 5)],
    "logp": [np.ones(2, np.float32) * n for n in range(3)],
    "one": [np.array([7], dtype=np.int32)],
    "mixed_dtypes": [np.zeros(2, np.int32), np.zeros(2, np.float32)],
    "fillers_among_arrays": [np.zeros(2, np.int32), [0, 0]],
    "mixed_shapes": [np.zeros((2, 3), np.int32), np.zeros((2, 4), np.int32)],
    "some_without": [
        None,
        np.arange(6, dtype=np.uint8).reshape(1, 3, 2),
        None,
        np.arange(12, dtype=np.uint8).reshape(2, 3, 2),
    ],
    "nothing": [None, None],
    "routes": [np.zeros((2, 3, 4), np.int32)],
    "lists": [[1, 2], [3]],
    "objects": [np.array([None, "x"], dtype=object)],
    "empty": [],
    "one_for_all": np.arange(4),
}


def same(a, b) -> bool:
    if isinstance(a, np.ndarray):
        return a.dtype == b.dtype and a.shape == b.shape and bool((a == b).all())
    if isinstance(a, list):
        return isinstance(b, list) and len(a) == len(b) and all(same(x, y) for x, y in zip(a, b, strict=True))
    return a == b


@pytest.mark.parametrize("name", COLUMNS)
def test_a_shard_arrives_as_it_was_sent(name):
    shard = TrainShard(4, {name: COLUMNS[name]}, [StepPlan([[0]], 1, 1)], {"note": 1})
    arrived = pickle.loads(pickle.dumps(shard, protocol=5))
    assert same(arrived.columns[name], COLUMNS[name])
    assert (arrived.rollout_id, arrived.steps, arrived.metadata) == (4, shard.steps, {"note": 1})
    assert shard.columns[name] is COLUMNS[name], "the sender keeps what it has"


def test_many_small_arrays_travel_as_one_buffer():
    buffers = []
    columns = {"tokens": [np.arange(n, dtype=np.int32) for n in range(1, 200)]}
    pickle.dumps(TrainShard(0, columns, []), protocol=5, buffer_callback=buffers.append)
    assert len(buffers) == 1


def test_only_lists_of_arrays_of_one_dtype_and_row_are_joined():
    joined = {name for name, value in pack(COLUMNS).items() if isinstance(value, Ragged)}
    assert joined == {"tokens", "logp", "one", "routes", "some_without"}
    assert all(same(value, COLUMNS[name]) for name, value in unpack(pack(COLUMNS)).items())
