"""Real buckets through a real gloo group into engine processes, and every way in which that can break."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import threading
import time
from types import SimpleNamespace

import pytest
import torch

from miles.backends.engine_api.client import EngineClient
from miles.utils.digest import tensor_digest
from miles.weight_update.errors import WeightTransferError
from miles.weight_update.transaction import run_update
from miles.weight_update.transports.base import WeightTransport, load_transport
from miles.weight_update.transports.broadcast import BroadcastTransport
from miles.weight_update.types import EngineEndpoint
from miles.weight_update.updater import WeightUpdater
from tests.fast.weight_update.fake_engine import EngineHandle
from tests.helpers.update_args import update_args


def make_args(**fields) -> SimpleNamespace:
    return update_args(**{"update_weight_buffer_size": 100} | fields)


class Backend:
    """The only rank of a trainer: three tensors of three dtypes, filled with `value`."""

    is_weight_source = True

    def __init__(self, value: float = 1.0) -> None:
        self.value = value

    def iter_weights(self):
        yield "embed.weight", torch.full((5, 3), self.value)
        yield "norm.weight", torch.full((3,), self.value, dtype=torch.bfloat16)
        yield "table", torch.arange(200, dtype=torch.uint8)


@pytest.fixture(scope="module")
def processes(tmp_path_factory):
    """Two engine processes; a test that kills one replaces it here."""
    log_dir = tmp_path_factory.mktemp("engines")
    engines = [EngineHandle(i, log_dir) for i in range(2)]
    yield engines
    for engine in engines:
        engine.stop()


@pytest.fixture
def engines(processes, tmp_path):
    """Two healthy engines. A test that broke one gets fresh ones made for the next test."""
    for i, engine in enumerate(processes):
        if engine.process.poll() is not None or getattr(engine, "spoilt", False):
            engine.stop()
            processes[i] = EngineHandle(i, tmp_path)
    for engine in processes:
        engine.reset()
    return processes


def endpoints(engines) -> list[EngineEndpoint]:
    return [e.endpoint() for e in engines]


def digests(engine: EngineHandle) -> dict[str, str]:
    async def ask():
        async with EngineClient(engine.url, admin_key="key") as client:
            return await client.weights_checksums()

    return asyncio.run(ask())


def update(args, engines, updater, version=1):
    async def transfer():
        return await asyncio.to_thread(updater.transfer, version, endpoints(engines))

    return asyncio.run(run_update(args, version, endpoints(engines), transfer))


def test_weights_arrive_whole_on_every_engine_update_after_update(engines):
    args, backend = make_args(), Backend()
    updater = WeightUpdater(args, backend)
    try:
        for version in (1, 2):
            backend.value = float(version)
            outcome = update(args, engines, updater, version)
            assert outcome.succeeded, outcome.error
            wanted = {name: tensor_digest(tensor) for name, tensor in backend.iter_weights()}
            for engine in engines:
                assert digests(engine) == wanted
                assert engine.state()["version"] == str(version)
        # 60 + 6 bytes fit into one bucket of 100; 200 bytes travel alone.
        assert (outcome.report.buckets, outcome.report.nbytes) == (2, 266)
        # One group serves both updates.
        assert [e.state()["calls"].count("init_weights_update_group") for e in engines] == [1, 1]
    finally:
        updater.close()


def test_a_changed_fleet_forms_a_new_group_and_the_old_one_is_left(engines):
    args = make_args()
    updater = WeightUpdater(args, Backend())
    try:
        assert update(args, engines, updater).committed == {0, 1}
        assert update(args, engines[:1], updater).committed == {0}
        assert "destroy_weights_update_group" in engines[0].state()["calls"]
        assert update(args, engines, updater).committed == {0, 1}
    finally:
        updater.close()


@pytest.mark.parametrize(
    ("fault", "message"),
    [("die_inside", r"engine 1: http.*update_weights_from_distributed"), ("500", "engine 1: .* 500")],
)
def test_an_engine_that_breaks_in_a_bucket_is_named_at_once(engines, fault, message):
    args = make_args()
    updater = WeightUpdater(args, Backend())
    engines[1].faults(update_weights_from_distributed=fault)
    for engine in engines:
        engine.spoilt = True  # both have half an update, as after any broken broadcast
    try:
        started = time.monotonic()
        outcome = update(args, engines, updater)
        assert time.monotonic() - started < 10
        assert not outcome.succeeded and outcome.fenced == {0, 1}
        assert "bucket 0 (embed.weight and 1 more, 66 bytes)" in outcome.error
        assert re.search(message, outcome.error), outcome.error
    finally:
        updater.close()


@pytest.mark.parametrize("fault", ["absent", "hang"])
def test_an_engine_that_hangs_in_a_bucket_meets_the_deadline(engines, fault):
    args = make_args(weight_update_timeout=3.0)
    updater = WeightUpdater(args, Backend())
    engines[1].faults(update_weights_from_distributed=fault)
    for engine in engines:
        engine.spoilt = True
    try:
        with pytest.raises(
            WeightTransferError, match=r"bucket 0 .* within the 3 s of an update: .*engine 1"
        ) as failure:
            updater.transfer(1, endpoints(engines))
        assert failure.value.touched == {0, 1}
    finally:
        updater.close()


def test_after_a_failure_the_next_update_to_fresh_engines_works(engines, processes, tmp_path):
    args = make_args()
    updater = WeightUpdater(args, Backend())
    engines[0].faults(update_weights_from_distributed="die_inside")
    try:
        assert not update(args, engines, updater).succeeded
        for i in range(2):  # what the fleet does with the fenced
            engines[i].stop()
            processes[i] = EngineHandle(i, tmp_path)
            processes[i].reset()
        assert update(args, processes, updater).committed == {0, 1}
    finally:
        updater.close()


@pytest.mark.parametrize("fault", ["refuse", "hang"])
def test_an_engine_that_does_not_join_leaves_all_engines_untouched(engines, fault):
    args = make_args(weight_update_timeout=3.0)
    updater = WeightUpdater(args, Backend())
    engines[1].faults(init_weights_update_group=fault)
    for engine in engines:
        engine.spoilt = True  # engine 0 waits in the group for a while
    try:
        with pytest.raises(WeightTransferError, match=r"did not form a group within 3 s: .*engine 1") as failure:
            updater.transfer(1, endpoints(engines))
        assert failure.value.touched == frozenset()
    finally:
        updater.close()


def test_an_engine_killed_between_updates_is_found_before_anything_is_sent(engines, processes, tmp_path):
    args = make_args()
    updater = WeightUpdater(args, Backend())
    try:
        assert update(args, engines, updater).succeeded
        os.kill(engines[1].process.pid, signal.SIGKILL)
        engines[1].process.wait(10)
        outcome = update(args, engines, updater, version=2)
        assert not outcome.succeeded and outcome.fenced == {1}
        assert engines[0].state()["version"] == "1" and not engines[0].state()["paused"]
        processes[1] = EngineHandle(1, tmp_path)
        processes[1].reset()
        assert update(args, processes, updater, version=2).committed == {0, 1}
    finally:
        updater.close()


@pytest.mark.parametrize("fault", ["ack", "drop", "flip"])
def test_what_an_engine_did_not_load_is_found_by_digest(engines, fault):
    args = make_args()
    updater = WeightUpdater(args, Backend(value=float(len(fault)) + 20))
    engines[1].faults(update_weights_from_distributed=fault)
    engines[1].spoilt = True
    try:
        outcome = update(args, engines, updater)
        assert (outcome.committed, outcome.fenced) == ({0}, {1})
        assert "embed.weight" in outcome.failures[1]
    finally:
        updater.close()


def test_a_restarted_engine_gets_the_published_weights_although_the_trainer_went_on(engines):
    args, backend = make_args(keep_published_weights=True), Backend(3.0)
    updater = WeightUpdater(args, backend)
    try:
        assert update(args, engines, updater, 1).succeeded
        published = digests(engines[0])
        backend.value = 4.0
        report = updater.resend(1, endpoints(engines[1:]))
        assert {n: r.digest for n, r in report.manifest.items()} == published == digests(engines[1])
        with pytest.raises(WeightTransferError, match="no copy of version 2 is kept here"):
            updater.resend(2, endpoints(engines[1:]))
    finally:
        updater.close()


def test_a_backend_that_exports_a_name_twice_is_refused(engines):
    class Twice(Backend):
        def iter_weights(self):
            yield from super().iter_weights()
            yield "table", torch.zeros(1, dtype=torch.uint8)

    updater = WeightUpdater(make_args(), Twice())
    for engine in engines:
        engine.spoilt = True
    try:
        with pytest.raises(WeightTransferError, match="exports table twice") as failure:
            updater.transfer(1, endpoints(engines))
        assert failure.value.touched == {0, 1}  # earlier buckets had been sent
    finally:
        updater.close()


def test_closing_ends_every_thread(engines):
    def ours():
        return {t.name for t in threading.enumerate() if t.name.startswith("weight-")}

    before = ours()
    updater = WeightUpdater(make_args(), Backend())
    updater.transfer(1, endpoints(engines))
    assert ours() - before
    updater.close()
    assert ours() == before


def test_transports_are_chosen_by_name_or_import_path():
    transport = load_transport(make_args(update_weight_transfer_mode=f"{__name__}.Custom"), 1, 2)
    assert isinstance(transport, Custom) and (transport.source, transport.num_sources) == (1, 2)
    with pytest.raises(ValueError, match="--update-weight-transfer-mode rsync is not available; there is broadcast"):
        load_transport(make_args(update_weight_transfer_mode="rsync"))
    with pytest.raises(ValueError, match="not a subclass of WeightTransport"):
        load_transport(make_args(update_weight_transfer_mode=f"{__name__}.Backend"))
    broadcast = load_transport(make_args())
    assert isinstance(broadcast, BroadcastTransport)
    broadcast.close()


class Custom(WeightTransport):
    def connect(self, engines): ...
    def send(self, bucket): ...
    def finish(self): ...
    def abandon(self): ...
    def close(self): ...
