"""What travels together, and that nothing is lost on the way into bytes and back."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from miles.utils.digest import tensor_digest
from miles.weight_update.buckets import FlatBucket, pack_buckets, units
from miles.weight_update.types import Bucket

DTYPES = [torch.float32, torch.bfloat16, torch.uint8, torch.int64, torch.bool, torch.float8_e4m3fn]


def tensor(nbytes: int) -> torch.Tensor:
    return torch.zeros(nbytes, dtype=torch.uint8)


def names(items, limit: int) -> list[list[str]]:
    return [[name for name, _ in bucket.tensors] for bucket in pack_buckets(items, limit)]


def test_buckets_are_filled_in_order_up_to_the_limit():
    items = [("a", tensor(4)), ("b", tensor(6)), ("c", tensor(1)), ("d", tensor(9)), ("e", tensor(1))]
    assert names(items, 10) == [["a", "b"], ["c", "d"], ["e"]]


def test_a_tensor_larger_than_the_limit_travels_alone():
    items = [("a", tensor(1)), ("big", tensor(50)), ("b", tensor(1))]
    assert names(items, 10) == [["a"], ["big"], ["b"]]


def test_an_atomic_group_and_a_weight_with_its_scale_are_never_split():
    group = [("q_a", tensor(6)), ("kv_a", tensor(6))]
    items = [("x.weight", tensor(8)), ("x.weight_scale_inv", tensor(4)), group, ("y.weight", tensor(1))]
    assert names(items, 10) == [["x.weight", "x.weight_scale_inv"], ["q_a", "kv_a"], ["y.weight"]]
    # A scale without its weight before it is an ordinary tensor.
    assert [len(u) for u in units([("x.weight", tensor(1)), ("z.weight_scale_inv", tensor(1))])] == [1, 1]


def test_no_tensors_no_buckets():
    assert names([], 10) == []


def test_buckets_are_made_as_the_stream_is_read():
    read = []

    def stream():
        for name in "abc":
            read.append(name)
            yield name, tensor(8)

    next(pack_buckets(stream(), 10))
    assert read == ["a", "b", "c"][: len(read)] and len(read) <= 3


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.sampled_from(DTYPES), st.lists(st.integers(0, 5), max_size=3)), min_size=1, max_size=8))
def test_bytes_come_back_as_the_tensors_they_were(specs):
    tensors = []
    for i, (dtype, shape) in enumerate(specs):
        raw = torch.randint(0, 2 if dtype is torch.bool else 120, (torch.Size(shape).numel() * dtype.itemsize,))
        tensors.append((f"t{i}", raw.to(torch.uint8).view(dtype).reshape(shape)))
    flat = FlatBucket(Bucket(0, tensors))
    assert flat.nbytes == sum(t.numel() * t.element_size() for _, t in tensors)
    back = dict(flat.tensors())
    assert back.keys() == dict(tensors).keys()
    for name, t in tensors:
        assert tensor_digest(back[name]) == tensor_digest(t) == flat.records(flat.data)[name].digest


def test_a_flat_bucket_keeps_its_bytes_while_the_model_goes_on():
    weight = torch.ones(3)
    flat = FlatBucket(Bucket(0, [("w", weight)]))
    weight.add_(1)
    assert dict(flat.tensors())["w"].tolist() == [1, 1, 1]
