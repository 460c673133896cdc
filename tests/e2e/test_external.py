"""Engines that ran before the run, which it adopts, updates, and leaves running."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import pytest

from miles.backends.embedded_engine.launch import launch as launch_engine
from miles.backends.engine_api.client import EngineClient
from miles.backends.engine_api.launcher import wait_ready
from miles.utils.process import terminate

pytestmark = pytest.mark.nightly


@pytest.fixture
def engines(model_dir, tmp_path):
    started = [
        launch_engine(
            SimpleNamespace(train_device="cpu", rollout_seed=i), index=i, host="127.0.0.1", port=0, admin_key="key",
            model_path=str(model_dir), log_path=tmp_path / f"external_{i}.log", weight_version=0,
        )
        for i in range(2)
    ]  # fmt: skip

    async def ready() -> None:
        for engine in started:
            async with EngineClient(engine.url) as client:
                await wait_ready(client, engine, 240)

    asyncio.run(ready())
    yield started
    for engine in started:
        terminate(engine.process)


def test_external_engines_are_updated_and_left_running(engines, flags, launch):
    """Two runs, one after the other, on the same servers."""
    addresses = [engine.url.removeprefix("http://") for engine in engines]
    external = {"rollout_external": True, "rollout_external_engine_addrs": addresses, "sglang_admin_api_key": "key"}
    argv = flags(num_rollout=2, rollout_engine="sglang", rollout_num_gpus=None, actor_num_gpus_per_node=1, **external)
    for name in ("first", "second"):  # the versions of one run mean nothing to the next
        run = launch(argv, name).wait(600).check()
        assert list(run.series("rollout/weight_version/mean").values()) == [1.0, 2.0]
        assert set(run.series("contract/weight_digest_verified").values()) == {1.0}
        assert max(run.series("train/train_rollout_logprob_abs_diff").values()) < 1e-4
        assert "runs already at http://" in (run.run_dir / "plan.json").read_text()

    async def version(url: str) -> str:
        async with EngineClient(url) as client:
            answer = await client.generate({"input_ids": [5], "sampling_params": {"max_new_tokens": 1}})
            return answer["meta_info"]["weight_version"]

    assert all(engine.process.poll() is None for engine in engines)
    assert {asyncio.run(version(engine.url)) for engine in engines} == {"3"}
