"""Weights as handles to shared memory, into real embedded engines, which read nothing else."""

from __future__ import annotations

import base64
import pickle
import types

import pytest
import torch

from miles.backends.embedded_engine.payloads import decode_tensors
from miles.backends.embedded_engine.weights import WeightError
from miles.weight_update.buckets import FlatBucket
from miles.weight_update.errors import WeightTransferError
from miles.weight_update.preflight import check_weight_update_equal
from miles.weight_update.transports.ipc import IpcTransport, serialized
from miles.weight_update.types import Bucket, EngineEndpoint
from tests.fast.weight_update.test_embedded_engine import Fleet, next_token
from tests.helpers.update_args import update_args

IPC = {"update_weight_transfer_mode": "ipc", "colocate": True}


@pytest.fixture(scope="module")
def fleet(tmp_path_factory):
    """An honest engine, and one that changes a value of what it got."""
    engines = Fleet(tmp_path_factory.mktemp("ipc"), "qwen3", (), ("corrupt_tensor=lm_head.weight",))
    yield engines.wait()
    engines.stop()


def bucket() -> FlatBucket:
    tensors = [("a", torch.arange(3, dtype=torch.bfloat16)), ("b", torch.rand(2, 5)), ("c", torch.rand(0, 4))]
    return FlatBucket(Bucket(0, tensors))


def test_a_handle_opens_what_was_put_in_and_carries_no_bytes_of_it():
    flat = bucket()
    payload = serialized(flat)
    opened = dict(decode_tensors(payload, "flattened_bucket", torch.device("cpu")))
    assert {n: (t.dtype, t.shape) for n, t in opened.items()} == {n: (t.dtype, t.shape) for n, t in flat.tensors()}
    flat.data.zero_()
    assert all(not t.any() for t in opened.values()), "the reader sees the sender's memory, not a copy"


def test_the_metadata_needs_no_class_of_the_server():
    """Both servers refuse classes that are not on their lists; this one is on both."""
    named = set()

    class Names(pickle.Unpickler):
        def find_class(self, module, name):
            named.add(module.partition(".")[0])
            return super().find_class(module, name)

    import io

    content = Names(io.BytesIO(base64.b64decode(serialized(bucket())))).load()
    assert named == {"torch", "types"}
    entry = content["metadata"][0]
    assert isinstance(entry, types.SimpleNamespace)
    assert (entry.name, entry.start_idx, entry.end_idx, entry.numel) == ("b", 0, 40, 40)


def test_a_gpu_that_the_engine_does_not_see_is_named():
    class Elsewhere:
        def __reduce__(self):
            from torch.multiprocessing.reductions import rebuild_cuda_tensor

            return rebuild_cuda_tensor, (torch.Tensor, (1,), (1,), 0, torch.storage.TypedStorage, torch.uint8, "GPU-1")

    payload = base64.b64encode(pickle.dumps([("x", Elsewhere())])).decode()
    with pytest.raises(WeightError, match="on GPU GPU-1, and this engine sees none"):
        decode_tensors(payload, None, torch.device("cpu"))


async def test_updates_reach_the_engine_verified_and_one_that_holds_something_else_is_fenced(fleet):
    for _ in range(2):
        fleet.trainer.step()
        outcome = await fleet.update(**IPC)
        assert (outcome.committed, outcome.fenced) == ({0}, {1}), outcome.error
        assert "lm_head.weight" in outcome.failures[1] and outcome.report.buckets > 1
        async with fleet.client() as client:
            token, log_prob, _ = await next_token(client)
        wanted = fleet.trainer.next_log_probs(list(range(10, 50)))
        assert token == int(wanted.argmax()) and abs(log_prob - float(wanted.max())) < 1e-4
        async with fleet.client(1) as client:  # it would be replaced; here it is repaired
            await client.end_weight_update()
            await client.continue_()
    outcome = await fleet.update(check_weight_update_equal, **IPC)
    assert set(outcome.failures) == {1}


def test_an_engine_of_several_ranks_is_refused_before_anything_is_sent():
    transport = IpcTransport(update_args(**IPC), 0, 1)
    with pytest.raises(
        WeightTransferError, match=r"engine 0 has 2 ranks.*set --rollout-num-gpus-per-engine 1"
    ) as error:
        transport.connect([EngineEndpoint(0, "http://127.0.0.1:1", "key", 2, 0)])
    assert error.value.touched == frozenset()
    transport.close()


def test_an_engine_that_is_gone_is_named_with_the_bucket_and_is_in_doubt():
    transport = IpcTransport(update_args(**IPC), 0, 1)
    transport.connect([EngineEndpoint(4, "http://127.0.0.1:1", "key", 1, 0)])
    transport.send(bucket())
    with pytest.raises(WeightTransferError, match=r"bucket 0 \(b and 2 more, 46 bytes\).*engine 4: .*connection lost"):
        transport.finish()
    assert transport.touched == {4}
    transport.abandon()
    transport.close()
