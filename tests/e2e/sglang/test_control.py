"""Pauses, weights by every way that this build has, versions, checker and memory: on both engines, with one client."""

from __future__ import annotations

import asyncio
import base64
import shutil
from types import SimpleNamespace

import pytest
import safetensors.torch
import torch

from miles.backends.engine_api.client import EngineClient, EngineRejected
from miles.weight_update.preflight import check_weight_update_equal
from miles.weight_update.transaction import run_update
from miles.weight_update.updater import WeightUpdater
from tests.e2e.sglang.test_parity import OTHER, PROMPT, assert_equal
from tests.fast.weight_update.test_embedded_engine import Trainer
from tests.helpers.update_args import update_args

LONG = {"input_ids": PROMPT, "sampling_params": {"max_new_tokens": 400, "ignore_eos": True}, "return_logprob": True}


def arguments(**changes) -> SimpleNamespace:
    return update_args(**{"weight_update_timeout": 30.0} | changes)


@pytest.fixture(scope="module")
def trainer(servers):
    return Trainer(servers["sglang"].model_dir)


@pytest.fixture(scope="module")
def versions():
    """The next version of both engines."""
    return iter(range(1, 100))


def update(servers, trainer, version: int, run=run_update, transfer_of=None, **changes):
    """One transaction over both engines, in one group."""
    args = arguments(**changes)
    endpoints = [server.endpoint(i) for i, server in enumerate(servers.values())]
    updater = WeightUpdater(args, trainer)

    async def transfer():
        report = await asyncio.to_thread(updater.transfer, version, endpoints)
        return report if transfer_of is None else await transfer_of(report)

    async def both():
        try:
            return await run(args, version, endpoints, transfer)
        finally:
            await asyncio.to_thread(updater.close)

    return asyncio.run(both())


@pytest.mark.parametrize("transport", ["broadcast", "ipc"])
def test_an_update_is_verified_on_both_and_changes_what_they_generate(servers, trainer, versions, transport):
    trainer.step()
    version = next(versions)
    outcome = update(servers, trainer, version, update_weight_transfer_mode=transport)
    assert outcome.error is None and outcome.committed == {0, 1} and outcome.verified
    expected = trainer.next_log_probs(PROMPT)
    answers = [server.generate(PROMPT, sampling_params={"max_new_tokens": 1}) for server in servers.values()]
    assert_equal(*answers)
    for answer in answers:
        assert answer["meta_info"]["weight_version"] == str(version)
        value, token, _ = answer["meta_info"]["output_token_logprobs"][0]
        assert abs(value - float(expected[token])) < 1e-4


def test_the_check_fills_with_noise_and_finds_everything_delivered(servers, trainer, versions):
    outcome = update(servers, trainer, next(versions), run=check_weight_update_equal)
    assert outcome.error is None and outcome.committed == {0, 1}


def test_a_tensor_that_changed_on_the_way_is_named(servers, trainer, versions):
    """Something else writes into both engines after the transfer: neither may serve the new version."""
    name = "model.layers.1.self_attn.k_proj.weight"
    tensors = dict(trainer.iter_weights())

    async def tamper(report):
        for server in servers.values():
            changed = {name: tensors[name] + 1e-3}
            payload = base64.b64encode(pickled(server.name, changed)).decode()
            async with server.client() as client:
                await client.update_weights_from_tensor([payload])
        return report

    outcome = update(servers, trainer, next(versions), transfer_of=tamper)
    assert outcome.fenced == {0, 1} and not outcome.committed
    assert "k_proj" in outcome.failures[0] and "qkv_proj" in outcome.failures[1]
    # A fenced engine would be replaced; these two are repaired.
    for server in servers.values():
        server.call(lambda client: client.end_weight_update())
        server.call(lambda client: client.continue_())
    assert update(servers, trainer, next(versions)).committed == {0, 1}


def pickled(engine: str, tensors: dict[str, torch.Tensor]) -> bytes:
    """The payload that each takes: SGLang's own pickle, or safetensors."""
    if engine == "embedded":
        return safetensors.torch.save({n: t.contiguous() for n, t in tensors.items()})
    import io
    from multiprocessing.reduction import ForkingPickler

    import torch.multiprocessing

    torch.multiprocessing.set_sharing_strategy("file_system")  # SGLang cannot reach this process's descriptors
    stream = io.BytesIO()
    ForkingPickler(stream).dump(list(tensors.items()))
    return stream.getvalue()


# Not `abort`: SGLang 0.5.21 on a CPU did not answer a pause in that mode within 30 s while a request was in flight.
@pytest.mark.parametrize("mode", ["retract", "in_place"])
def test_requests_in_flight_meet_an_update_as_the_mode_says(servers, trainer, versions, mode):
    version = next(versions)

    async def run():
        endpoints = [server.endpoint(i) for i, server in enumerate(servers.values())]
        args = arguments(pause_generation_mode=mode)
        updater = WeightUpdater(args, trainer)
        clients = [server.client() for server in servers.values()]
        tasks = [asyncio.create_task(client.generate(LONG)) for client in clients]
        await asyncio.sleep(0.2)  # of the second or more that either engine takes

        async def transfer():
            return await asyncio.to_thread(updater.transfer, version, endpoints)

        try:
            outcome = await run_update(args, version, endpoints, transfer)
            return outcome, await asyncio.gather(*tasks)
        finally:
            await asyncio.to_thread(updater.close)
            await asyncio.gather(*(client.close() for client in clients))

    outcome, answers = asyncio.run(run())
    assert outcome.error is None and outcome.committed == {0, 1}, outcome.error
    for answer in answers:
        meta = answer["meta_info"]
        count = len(answer["output_ids"])
        assert len(meta["output_token_logprobs"]) == count
        spans = [(s["version"], s["start"], s["end"]) for s in meta["weight_versions"]]
        assert count == 400 and len(spans) == 2, spans
        assert spans[-1][0] == str(version) and spans[0][2] == spans[1][1] and spans[-1][2] == 400


def test_weights_from_disk(servers, trainer, versions, tmp_path):
    """A directory that was saved elsewhere: both load it and name it; a directory that is not there changes nothing."""
    version = next(versions)
    trainer.step()
    folder = tmp_path / "saved"
    shutil.copytree(servers["sglang"].model_dir, folder)
    tensors = {n: t.contiguous() for n, t in trainer.iter_weights()}
    safetensors.torch.save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    expected = trainer.next_log_probs(OTHER)
    for server in servers.values():
        with pytest.raises(EngineRejected):
            server.call(lambda client: client.update_weights_from_disk("/nowhere/at/all"))
        server.call(lambda client: client.update_weights_from_disk(str(folder), version, flush_cache=True))
    ours, theirs = (server.generate(OTHER, sampling_params={"max_new_tokens": 1}) for server in servers.values())
    assert_equal(ours, theirs)
    assert ours["meta_info"]["weight_version"] == str(version)
    value, token, _ = theirs["meta_info"]["output_token_logprobs"][0]
    assert abs(value - float(expected[token])) < 1e-4


def test_an_update_session_is_opened_once_and_closed_once(servers):
    async def twice(client: EngineClient) -> None:
        assert await client.begin_weight_update()
        with pytest.raises(EngineRejected, match="already open"):
            await client.begin_weight_update()
        assert await client.end_weight_update()
        with pytest.raises(EngineRejected):
            await client.end_weight_update()

    for server in servers.values():
        server.call(twice)


def test_a_paused_engine_is_alive_and_can_be_flushed_with_requests_queued(servers):
    async def paused(client: EngineClient) -> None:
        running = asyncio.create_task(client.generate(LONG))
        await asyncio.sleep(0.3)
        await client.pause("retract")
        await client.alive(timeout_s=2)
        await client.health(timeout_s=2)
        await client.flush(timeout_s=5)
        late = asyncio.create_task(client.generate({"input_ids": OTHER, "sampling_params": {"max_new_tokens": 1}}))
        await asyncio.sleep(0.3)
        assert not running.done() and not late.done()
        await client.continue_()
        assert len((await running)["output_ids"]) == 400
        await late

    for server in servers.values():
        server.call(paused)


def test_memory_is_released_and_resumed_around_an_update(servers, trainer, versions):
    """On a CPU SGLang accepts both and frees nothing: what must hold is that weights sent afterwards are served."""
    for server in servers.values():
        server.call(lambda client: client.release_memory())
        server.call(lambda client: client.resume_memory())
    outcome = update(servers, trainer, next(versions))
    assert outcome.committed == {0, 1}, outcome.error
    assert_equal(*(server.generate(OTHER) for server in servers.values()))


def test_naming_the_version_does_not_abort_what_runs(servers):
    async def name_it(client: EngineClient) -> dict:
        running = asyncio.create_task(client.generate(LONG))
        await asyncio.sleep(0.3)
        await client.update_weight_version(77)
        return await running

    for server in servers.values():
        answer = server.call(name_it)
        assert len(answer["output_ids"]) == 400
        assert answer["meta_info"]["weight_versions"][-1]["version"] == "77"
