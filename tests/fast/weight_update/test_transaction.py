"""What each kind of failure leaves behind, against real HTTP servers."""

from __future__ import annotations

import asyncio
import contextlib
import pickle
import time

import pytest
import torch

from miles.backends.engine_api.client import EngineClient
from miles.utils.digest import dtype_name, tensor_digest
from miles.weight_update.errors import WeightTransferError
from miles.weight_update.transaction import Transaction, UpdateSettings
from miles.weight_update.types import TensorRecord, TransferReport
from tests.fast.weight_update.fake_engine import FakeEngine, in_thread

SETTINGS = UpdateSettings(control_s=1.0, transfer_s=1.0, verify_s=1.0)
NEW = {"a.weight": torch.ones(2, 3), "b.weight": torch.zeros(4, dtype=torch.bfloat16)}


def report(version: int = 1, weights=None) -> TransferReport:
    weights = NEW if weights is None else weights
    manifest = {n: TensorRecord(dtype_name(t.dtype), tuple(t.shape), tensor_digest(t)) for n, t in weights.items()}
    return TransferReport(version, manifest, 1, 32, 0.1, 0.2)


class Fleet:
    """Two engines that serve version 0, and a transfer that loads NEW into them."""

    def __init__(self, engines: list[FakeEngine], clients: dict[int, EngineClient]) -> None:
        self.engines, self.clients = engines, clients

    async def transfer(self) -> TransferReport:
        for engine in self.engines:
            engine.weights = {n: t.clone() for n, t in NEW.items()}
        return report()

    async def update(self, transfer=None, version: int = 1, settings=SETTINGS):
        return await Transaction(settings, version, self.clients, transfer or self.transfer).run()

    def resumed(self) -> list[bool]:
        return [not e.paused and not e.session for e in self.engines]


@pytest.fixture
async def fleet():
    engines = [FakeEngine(), FakeEngine()]
    for engine in engines:
        engine.version = "0"
        engine.weights = {n: torch.full_like(t, 7) for n, t in NEW.items()}
    with contextlib.ExitStack() as stack:
        urls = [stack.enter_context(in_thread(engine)) for engine in engines]
        clients = {i: EngineClient(u, admin_key="key", control_timeout_s=1, retries=0) for i, u in enumerate(urls)}
        yield Fleet(engines, clients)
        await asyncio.gather(*(c.close() for c in clients.values()))


async def test_an_update_commits_on_every_engine_in_the_order_all_servers_accept(fleet):
    outcome = await fleet.update()
    assert outcome.succeeded and outcome.error is None
    assert (outcome.committed, outcome.fenced) == ({0, 1}, set())
    for engine in fleet.engines:
        assert engine.version == "1" and not engine.paused
        order = ["model_info", "pause_generation", "flush_cache", "begin_weight_update", "weights_checker"]
        assert engine.calls == [*order, "end_weight_update", "update_weight_version", "continue_generation"]
        # Its default would abort every request in flight.
        assert engine.bodies["update_weight_version"]["abort_all_requests"] is False
    metrics = outcome.metrics()
    assert metrics["contract/weight_digest_verified"] == 1.0
    assert metrics["perf/update_weights/buckets"] == 1 and metrics["perf/update_weights/bytes"] == 32
    for name in ("pause_s", "gather_s", "transfer_s", "verify_s"):
        assert metrics[f"perf/update_weights/{name}"] > 0


async def test_in_place_keeps_the_cache_that_frozen_requests_need(fleet):
    outcome = await fleet.update(settings=UpdateSettings(pause_mode="in_place", control_s=1, transfer_s=1, verify_s=1))
    assert outcome.succeeded
    assert "flush_cache" not in fleet.engines[0].calls
    assert fleet.engines[0].bodies["pause_generation"] == {"mode": "in_place"}


async def test_a_server_without_update_sessions_is_updated_all_the_same(fleet):
    for engine in fleet.engines:
        engine.faults = {"begin_weight_update": "404", "end_weight_update": "404"}
    assert (await fleet.update()).committed == {0, 1}


@pytest.mark.parametrize("call", ["model_info", "pause_generation", "flush_cache", "begin_weight_update"])
@pytest.mark.parametrize("fault", ["500", "refuse", "hang"])
async def test_a_failure_before_the_transfer_touches_nobody(fleet, call, fault):
    fleet.engines[1].faults = {call: fault}
    outcome = await fleet.update(transfer=None)
    assert not outcome.succeeded and outcome.error.startswith(f"engine 1: {fleet.clients[1].base_url}/{call}")
    assert fleet.resumed()[0] and fleet.engines[0].version == "0"
    assert torch.equal(fleet.engines[0].weights["a.weight"], torch.full((2, 3), 7.0))
    # The other engine answers again once it is asked to go on; one that could not even name its version is lost.
    assert outcome.fenced == ({1} if call == "model_info" else set())


async def test_an_engine_that_cannot_resume_is_fenced(fleet):
    fleet.engines[0].faults = {"begin_weight_update": "500"}
    fleet.engines[1].faults = {"continue_generation": "hang"}
    outcome = await fleet.update()
    assert not outcome.succeeded and outcome.fenced == {1}
    assert fleet.resumed() == [True, False]


async def test_a_transfer_that_touched_nobody_leaves_everybody_on_the_old_version(fleet):
    async def transfer():
        raise WeightTransferError("the group did not form", frozenset())

    outcome = await fleet.update(transfer)
    assert not outcome.succeeded and outcome.fenced == set() and fleet.resumed() == [True, True]
    assert outcome.error == "the transfer failed: the group did not form"


async def test_a_transfer_that_breaks_off_fences_the_engines_it_touched_and_no_other(fleet):
    async def transfer():
        raise WeightTransferError("bucket 3 did not arrive", frozenset({1}))

    outcome = await fleet.update(transfer)
    assert (outcome.committed, outcome.fenced) == (set(), {1})
    assert fleet.resumed() == [True, False]  # the fenced one must not generate from mixed weights


async def test_an_unknown_failure_of_the_trainer_fences_everybody(fleet):
    async def transfer():
        raise RuntimeError("trainer rank 0 died")

    outcome = await fleet.update(transfer)
    assert outcome.fenced == {0, 1} and "trainer rank 0 died" in outcome.error
    assert fleet.resumed() == [False, False]


async def test_a_trainer_that_hangs_meets_the_deadline(fleet, monkeypatch):
    async def transfer():
        await asyncio.sleep(3600)

    started = time.monotonic()
    settings = UpdateSettings(control_s=1, transfer_s=-8.0, verify_s=1)  # 1.1 * -8 + 10 is 1.2 s
    outcome = await fleet.update(transfer, settings=settings)
    assert time.monotonic() - started < 5
    assert outcome.fenced == {0, 1} and "did not finish its transfer" in outcome.error


async def test_an_engine_that_acknowledges_without_loading_never_commits(fleet):
    async def transfer():
        fleet.engines[0].weights = {n: t.clone() for n, t in NEW.items()}
        return report()

    outcome = await fleet.update(transfer)
    assert (outcome.committed, outcome.fenced) == ({0}, {1})
    assert "2 of 2 tensors are not what the trainer sent" in outcome.failures[1]
    assert "a.weight" in outcome.failures[1] and "b.weight" in outcome.failures[1]
    assert fleet.engines[0].version == "1" and fleet.engines[1].version == "0"
    assert fleet.resumed() == [True, False]
    assert outcome.metrics()["contract/weight_digest_verified"] == 1.0  # of the engines that serve


async def test_a_tensor_that_the_trainer_forgot_is_found_on_every_engine(fleet):
    async def transfer():
        await fleet.transfer()
        return report(weights={"a.weight": NEW["a.weight"]})

    outcome = await fleet.update(transfer)
    assert not outcome.succeeded and outcome.fenced == {0, 1}
    assert "b.weight: the trainer did not send it" in outcome.error


async def test_without_verification_the_metric_says_so(fleet):
    outcome = await fleet.update(settings=UpdateSettings(verify=False, control_s=1, transfer_s=1))
    assert outcome.succeeded and outcome.metrics()["contract/weight_digest_verified"] == 0.0


@pytest.mark.parametrize(
    "call", ["weights_checker", "end_weight_update", "update_weight_version", "continue_generation"]
)
@pytest.mark.parametrize("fault", ["500", "hang"])
async def test_an_engine_lost_after_the_transfer_is_fenced_and_the_others_commit(fleet, call, fault):
    fleet.engines[0].faults = {call: fault}
    outcome = await fleet.update()
    assert (outcome.committed, outcome.fenced) == ({1}, {0})
    assert call in outcome.failures[0] and fleet.engines[1].version == "1"


async def test_versions_only_grow(fleet):
    fleet.engines[0].version = "5"
    outcome = await fleet.update(version=4)
    assert not outcome.succeeded and "serves version 5 already" in outcome.error
    assert (await fleet.update(version=5)).committed == {0, 1}  # a restarted engine is brought to the same version


async def test_the_engine_of_another_run_is_not_touched(fleet):
    fleet.engines[1].admin_key = "another run's"
    outcome = await fleet.update()
    assert not outcome.succeeded and "belongs to another run" in outcome.failures[1]
    assert "pause_generation" not in fleet.engines[1].calls


async def test_a_cancelled_update_leaves_nobody_generating_from_doubtful_weights(fleet):
    begun = asyncio.Event()

    async def transfer():
        begun.set()
        await asyncio.sleep(3600)

    task = asyncio.create_task(fleet.update(transfer))
    await begun.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert fleet.resumed() == [False, False]


async def test_cancelled_before_the_transfer_everybody_resumes(fleet):
    fleet.engines[0].faults = {"begin_weight_update": "hang"}
    task = asyncio.create_task(fleet.update())
    while "begin_weight_update" not in fleet.engines[0].calls:
        await asyncio.sleep(0.01)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert [e.paused for e in fleet.engines] == [False, False]


async def test_no_engine_is_no_success():
    outcome = await Transaction(SETTINGS, 1, {}, None).run()
    assert not outcome.succeeded and outcome.error == "there is no engine to update"


def test_what_was_touched_survives_the_way_through_ray():
    import ray.exceptions

    error = pickle.loads(pickle.dumps(WeightTransferError("x", frozenset({2}))))
    wrapped = ray.exceptions.RayTaskError("transfer_weights", "traceback", error).as_instanceof_cause()
    assert wrapped.touched == {2}


async def test_a_session_that_a_broken_update_left_open_is_closed_first(fleet):
    fleet.engines[0].session = True
    assert (await fleet.update()).committed == {0, 1}
