"""The fleet over servers that it did not start, and over a model that is disaggregated: real embedded engines, no Ray."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import pytest

from miles.backends.embedded_engine.launch import launch
from miles.backends.engine_api.adoption import other_model
from miles.backends.engine_api.client import EngineClient
from miles.backends.engine_api.errors import EngineStartError
from miles.backends.engine_api.launcher import wait_ready
from miles.backends.engine_api.topology import EngineSpec
from miles.ray.engine_fleet import EngineFleet, EngineSlot, EngineState
from miles.router.engine_pool import EnginePool
from miles.utils.process import reserve_port, terminate
from tests.helpers.tiny_models import make_tiny_model
from tests.helpers.update_args import update_args


def make_args(model, *addresses: str, **changes):
    base = dict(
        hf_checkpoint=str(model),
        rollout_external=True,
        rollout_external_engine_addrs=list(addresses),
        debug_train_only=False,
        debug_rollout_only=False,
        sglang_api_key=None,
        sglang_admin_api_key="key",
        rollout_request_timeout=60.0,
        rollout_health_check_timeout=2.0,
        use_fault_tolerance=False,
        engine_start_timeout=60.0,
    )
    return update_args(**base | changes)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return make_tiny_model(tmp_path_factory.mktemp("external"))


@pytest.fixture
def server(model, tmp_path):
    """Starts an embedded engine at a port, again and again if need be."""
    started = []

    def start(port: int = 0):
        engine = launch(
            SimpleNamespace(train_device="cpu", rollout_seed=1), index=0, host="127.0.0.1", port=port,
            admin_key="key", model_path=str(model), log_path=tmp_path / f"log{len(started)}", weight_version=0,
        )  # fmt: skip
        started.append(engine)

        async def ready() -> None:
            async with EngineClient(engine.url) as client:
                await wait_ready(client, engine, 240)

        asyncio.run(ready())
        return engine

    yield start
    for engine in started:
        terminate(engine.process)


async def until(condition, timeout_s: float = 120) -> None:
    async with asyncio.timeout(timeout_s):
        while not condition():
            await asyncio.sleep(0.02)


def test_a_running_server_is_adopted_lost_found_again_and_never_ended(model, server):
    engine = server()

    async def run() -> None:
        # What a run that was killed in mid-update leaves behind.
        async with EngineClient(engine.url, admin_key="key") as owner:
            await owner.pause("retract")
            await owner.begin_weight_update()
        args = make_args(model, engine.url.removeprefix("http://"))
        fleet = EngineFleet(args, None, EnginePool(args))
        await fleet.start(0)
        try:
            (endpoint,) = await fleet.endpoints_for_update()
            assert (endpoint.url, endpoint.admin_key, endpoint.world_size) == (engine.url, "key", 1)
            fleet.admit([0], version=1)
            answer = await fleet.pool.generate({"input_ids": [5], "sampling_params": {"max_new_tokens": 2}})
            assert len(answer["output_ids"]) == 2, "it was resumed"
            terminate(engine.process)
            await until(lambda: fleet.slots[0].state is not EngineState.SERVING)
            assert fleet.pool.healthy() == []
            again = await asyncio.to_thread(server, int(engine.url.rpartition(":")[2]))
            await until(lambda: fleet.slots[0].state is EngineState.STALE)
            assert fleet.slots[0].incarnation == 1 and fleet.endpoint(fleet.slots[0]).incarnation == 1
            await fleet.fence([0])  # its weights are in doubt: it must not serve, and it is not ours to end
            assert fleet.slots[0].state is EngineState.STALE and fleet.pool.healthy() == []
        finally:
            await fleet.stop()
        assert again.process.poll() is None

    asyncio.run(run())


def test_what_cannot_be_adopted_is_refused_at_once(model, server, tmp_path):
    engine = server()
    other = make_tiny_model(tmp_path / "other", "llama")

    async def refused(args) -> str:
        fleet = EngineFleet(args, None, EnginePool(args))
        with pytest.raises(EngineStartError) as error:
            await fleet.start(0)
        await fleet.stop()
        return str(error.value)

    with reserve_port() as free:
        port = free.getsockname()[1]
    nobody = asyncio.run(refused(make_args(model, f"127.0.0.1:{port}")))
    assert f"127.0.0.1:{port} cannot be adopted (--rollout-external-engine-addrs)" in nobody
    assert "belongs to another run" in asyncio.run(refused(make_args(model, engine.url, sglang_admin_api_key="no")))
    assert "LlamaForCausalLM" in asyncio.run(refused(make_args(other, engine.url)))
    assert engine.process.poll() is None


def test_a_model_of_another_shape_shows_where_its_folder_is_seen(model, tmp_path):
    wide = make_tiny_model(tmp_path / "wide", num_hidden_layers=3)
    told = other_model({"model_path": str(wide), "architectures": ["Qwen3ForCausalLM"]}, str(model))
    assert told is not None and "num_hidden_layers 3 instead of 2" in told
    assert other_model({"model_path": "elsewhere"}, str(model)) is None


class Pairs(EngineFleet):
    """Slots without servers: what is published to the pool is what is looked at."""

    def __init__(self, *kinds: str) -> None:
        args = make_args("/m")
        super().__init__(args, None, EnginePool(args))
        self.slots = [EngineSlot(EngineSpec(i, 1, i, kind), SimpleNamespace()) for i, kind in enumerate(kinds)]
        self.pools = {"actor": self.pool}
        for slot in self.slots:
            slot.state, slot.client = EngineState.STALE, EngineClient(f"http://h:{slot.index}")


async def test_decode_engines_serve_while_some_prefill_engine_does():
    fleet = Pairs("prefill", "prefill", "decode", "decode")
    fleet.admit([2, 3], version=1)
    assert fleet.pool.healthy() == []
    fleet.admit([1])
    assert fleet.pool.healthy() == [2, 3]
    assert [c.base_url for c in fleet.pool.client(2).prefills] == ["http://h:1"]
    fleet.admit([0])
    assert len(fleet.pool.client(3).prefills) == 2
    for index in (0, 1):
        fleet.slots[index].state = EngineState.DEAD
        fleet._serve(fleet.slots[index])
    assert fleet.pool.healthy() == []
