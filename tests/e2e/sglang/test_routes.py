"""Which experts each token went through, from a mixture-of-experts model on SGLang, as they arrive with a sample."""

from __future__ import annotations

import asyncio
import base64
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import transformers

from miles.backends.engine_api.client import EngineClient
from miles.rollout.base_types import GenerateFnInput
from miles.rollout.generate_hub.single_turn import generate
from miles.rollout.generate_state import GenerateState
from miles.utils.process import terminate
from miles.utils.types import Sample
from miles.weight_update.transaction import run_update
from miles.weight_update.updater import WeightUpdater
from tests.e2e.sglang.conftest import ENGINES, start, wait
from tests.e2e.sglang.test_parity import PROMPT
from tests.fast.rollout.fakes import make_args
from tests.fast.weight_update.test_embedded_engine import Trainer
from tests.helpers.tiny_models import make_tiny_model
from tests.helpers.update_args import update_args

LAYERS, TOPK = 2, 2


@pytest.fixture(scope="module")
def moe(sglang_python, tmp_path_factory):
    folder = tmp_path_factory.mktemp("moe")
    # 32: SGLang pads experts of another width on a CPU, and what it pads cannot be verified.
    model_dir = make_tiny_model(folder / "model", "qwen3_moe", moe_intermediate_size=32)
    flags = {"use_rollout_routing_replay": True}
    started = {name: start(name, sglang_python, model_dir, folder, **flags) for name in ENGINES}
    try:
        yield {name: wait(server) for name, server in started.items()}
    finally:
        for server in started.values():
            terminate(server.process.process)


def routes_of(answer: dict) -> np.ndarray:
    """`[tokens - 1, layers, topk]`, the experts of a token in the order of their numbers."""
    flat = np.frombuffer(base64.b64decode(answer["meta_info"]["routed_experts"]), dtype=np.int32)
    return np.sort(flat.reshape(-1, LAYERS, TOPK), axis=-1)


def test_both_report_the_experts_of_every_token_but_the_last(moe):
    for _ in range(2):  # the second time, most of the prompt comes from the prefix cache
        ours, theirs = (moe[name].generate(PROMPT, return_routed_experts=True) for name in ENGINES)
        assert ours["output_ids"] == theirs["output_ids"]
        assert routes_of(theirs).shape == (len(PROMPT) + 8 - 1, LAYERS, TOPK)
        assert np.array_equal(routes_of(ours), routes_of(theirs))
    parts = [
        moe[name].generate(PROMPT, return_routed_experts=True, routed_experts_start_len=len(PROMPT)) for name in ENGINES
    ]
    assert all(np.array_equal(routes_of(part), routes_of(theirs)[len(PROMPT) :]) for part in parts)


def test_a_sample_carries_the_routes_of_its_own_tokens(moe):
    """By the rollout's own path, for a sample that is continued: the experts that the model itself picks for these tokens."""
    server = moe["sglang"]
    args = make_args(
        server.model_dir, use_rollout_routing_replay=True, rollout_max_response_len=6, rollout_temperature=1.0
    )

    async def run() -> Sample:
        async with server.client() as client:
            engines = SimpleNamespace(generate=lambda payload, routing_key=None: client.generate(payload))
            state = GenerateState(args, engines)
            sample = Sample(index=0, prompt="How many apples?")
            for limit in (3, 6):
                params = {**state.sampling_params, "max_new_tokens": limit, "ignore_eos": True}
                sample = (await generate(GenerateFnInput(state, sample, params))).samples
            return sample

    sample = asyncio.run(run())
    sample.validate()
    assert sample.response_length == 6
    model = transformers.AutoModelForCausalLM.from_pretrained(server.model_dir)
    with torch.no_grad():
        logits = model(torch.tensor([sample.tokens]), output_router_logits=True).router_logits
    expected = np.stack([layer.topk(TOPK).indices.numpy() for layer in logits], axis=1)[:-1]
    assert np.array_equal(np.sort(sample.rollout_routed_experts), np.sort(expected))


def test_experts_are_updated_and_verified(moe):
    trainer = Trainer(moe["sglang"].model_dir)
    before = routes_of(moe["sglang"].generate(PROMPT, return_routed_experts=True))
    trainer.step()
    endpoints = [server.endpoint(i) for i, server in enumerate(moe.values())]
    args = update_args(weight_update_timeout=30.0)
    updater = WeightUpdater(args, trainer)

    async def update():
        async def transfer():
            return await asyncio.to_thread(updater.transfer, 1, endpoints)

        try:
            return await run_update(args, 1, endpoints, transfer)
        finally:
            await asyncio.to_thread(updater.close)

    outcome = asyncio.run(update())
    assert outcome.committed == {0, 1} and outcome.verified, outcome.error
    ours, theirs = (moe[name].generate(PROMPT, return_routed_experts=True) for name in ENGINES)
    assert np.array_equal(routes_of(ours), routes_of(theirs))
    assert not np.array_equal(before, routes_of(theirs)[: len(before)])


def test_a_server_that_was_not_told_to_keep_routes_refuses_or_sends_none(servers):
    """The dense model has none to send: a request for them must not come back as if it had."""

    async def ask(client: EngineClient) -> dict:
        return await client.generate({"input_ids": PROMPT, "return_routed_experts": True})

    answer = servers["sglang"].call(ask)
    assert not answer["meta_info"].get("routed_experts")
