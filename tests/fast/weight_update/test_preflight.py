"""--check-weight-update-equal: what an update does not write, stays noise, and is found."""

from __future__ import annotations

import contextlib
from types import SimpleNamespace

import pytest
import torch

from miles.utils.digest import tensor_digest
from miles.weight_update.preflight import check_weight_update_equal
from miles.weight_update.types import EngineEndpoint, TensorRecord, TransferReport
from tests.fast.weight_update.fake_engine import FakeEngine, in_thread

WEIGHTS = {"a.weight": torch.ones(4), "b.weight": torch.zeros(4)}


@pytest.fixture
def fleet():
    """Two engines that loaded the trainer's own checkpoint: without noise, every lost tensor would look delivered."""
    engines = [FakeEngine(), FakeEngine()]
    with contextlib.ExitStack() as stack:
        endpoints = []
        for i, engine in enumerate(engines):
            engine.weights = {n: t.clone() for n, t in WEIGHTS.items()}
            endpoints.append(EngineEndpoint(i, stack.enter_context(in_thread(engine)), "key", 1, 0))
        yield engines, endpoints


async def check(fleet, lost: dict[int, str] | None = None, **fields):
    engines, endpoints = fleet
    defaults = dict(weight_update_timeout=5.0, pause_generation_mode="retract", verify_weight_update=False)
    defaults |= dict(check_weight_update_selector="all", check_weight_update_skip_list=None)

    async def transfer():
        for i, engine in enumerate(engines):
            engine.weights |= {n: t.clone() for n, t in WEIGHTS.items() if n != (lost or {}).get(i)}
        manifest = {n: TensorRecord("float32", (4,), tensor_digest(t)) for n, t in WEIGHTS.items()}
        return TransferReport(1, manifest, 1, 32, 0.0, 0.0)

    return await check_weight_update_equal(SimpleNamespace(**defaults | fields), 1, endpoints, transfer)


async def test_a_whole_update_passes_and_commits(fleet):
    outcome = await check(fleet)
    assert outcome.committed == {0, 1} and outcome.verified


async def test_a_tensor_that_one_engine_lost_fails_the_check_for_all(fleet):
    outcome = await check(fleet, lost={1: "b.weight"})
    assert (outcome.committed, outcome.fenced) == (set(), {0, 1})
    assert "1 of 2 tensors" in outcome.failures[1] and "b.weight" in outcome.failures[1]


async def test_the_skip_list_reports_but_does_not_fail(fleet, caplog):
    with caplog.at_level("INFO"):
        outcome = await check(fleet, lost={1: "b.weight"}, check_weight_update_skip_list=["b.w"])
    assert outcome.committed == {0, 1} and "by the skip list: 1 of 2 tensors" in caplog.text
    assert fleet[0][0].bodies["weights_checker"]["action"] == "checksum"


async def test_noise_that_changes_nothing_proves_nothing(fleet):
    fleet[0][1].faults = {"noise": "none"}
    outcome = await check(fleet)
    assert outcome.fenced == {0, 1} and "left 2 tensors unchanged, first a.weight" in outcome.failures[1]
