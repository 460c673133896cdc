"""The whole path with real parts: a Hugging Face model's weights, gloo, and embedded engine processes that serve it."""

from __future__ import annotations

import asyncio
import time
from types import SimpleNamespace

import pytest
import torch

from miles.backends.embedded_engine.launch import launch
from miles.backends.engine_api.client import EngineClient, EngineTimeout
from miles.backends.engine_api.launcher import wait_ready
from miles.utils.process import terminate
from miles.weight_update.preflight import check_weight_update_equal
from miles.weight_update.transaction import run_update
from miles.weight_update.types import EngineEndpoint
from miles.weight_update.updater import WeightUpdater
from tests.helpers.tiny_models import make_tiny_model
from tests.helpers.update_args import update_args

PROMPT = list(range(10, 50))


def make_args(**fields) -> SimpleNamespace:
    return update_args(**{"weight_update_timeout": 15.0} | fields)


class Trainer:
    """One rank that holds a Hugging Face model; `step` changes every weight."""

    is_weight_source = True

    def __init__(self, directory) -> None:
        import transformers

        self.model = transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)

    def step(self) -> None:
        with torch.no_grad():
            for parameter in self.model.parameters():
                parameter.add_(0.05 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1)))

    def iter_weights(self):
        from transformers.core_model_loading import revert_weight_conversion

        tied = {"lm_head.weight"} if self.model.config.tie_word_embeddings else set()
        tensors = {n: t.detach() for n, t in self.model.state_dict().items() if n not in tied}
        yield from revert_weight_conversion(self.model, tensors).items()

    def next_log_probs(self, tokens: list[int]) -> torch.Tensor:
        with torch.no_grad():
            return self.model(torch.tensor([tokens])).logits[0, -1].float().log_softmax(-1)


class Fleet:
    """Embedded engines of one model, each with its faults, and the trainer of that model."""

    def __init__(self, folder, family: str, *faults: tuple[str, ...]) -> None:
        directory = make_tiny_model(folder / "model", family)
        self.processes = [
            launch(
                make_args(), index=i, host="127.0.0.1", port=0, admin_key="key", model_path=str(directory),
                log_path=folder / f"engine_{i}.log", weight_version=0, faults=engine_faults,
            )
            for i, engine_faults in enumerate(faults)
        ]  # fmt: skip
        self.endpoints = [EngineEndpoint(i, p.url, "key", 1, 0) for i, p in enumerate(self.processes)]
        self.trainer = Trainer(directory)
        self.version = 0

    def wait(self) -> Fleet:
        async def all_ready() -> None:
            for process in self.processes:
                async with EngineClient(process.url, admin_key="key") as client:
                    await wait_ready(client, process, 60)

        asyncio.run(all_ready())
        return self

    def client(self, index: int = 0) -> EngineClient:
        return EngineClient(self.processes[index].url, admin_key="key")

    async def update(self, run=run_update, **fields):
        """Update all engines to the next version, from a new sender."""
        args, version = make_args(**fields), self.version + 1
        updater = WeightUpdater(args, self.trainer)

        async def transfer():
            return await asyncio.to_thread(updater.transfer, version, self.endpoints)

        try:
            outcome = await run(args, version, self.endpoints, transfer)
        finally:
            await asyncio.to_thread(updater.close)
        self.version += outcome.succeeded
        return outcome

    def stop(self) -> None:
        for engine in self.processes:
            terminate(engine.process, grace_s=0.2)


@pytest.fixture(scope="module")
def honest(tmp_path_factory):
    """One honest engine for all tests that leave it so."""
    fleet = Fleet(tmp_path_factory.mktemp("honest"), "qwen3", ("step_delay_s=0.005",))
    yield fleet.wait()
    fleet.stop()


@pytest.fixture
def start(tmp_path):
    """Start engines of a family; `start("qwen3", (), ("drop_tensor=x",))` gives two, the second one faulty."""
    fleets = []

    def begin(family: str, *faults: tuple[str, ...]) -> Fleet:
        fleets.append(Fleet(tmp_path, family, *faults))
        return fleets[-1].wait()

    yield begin
    for fleet in fleets:
        fleet.stop()


async def next_token(client: EngineClient) -> tuple[int, float, dict]:
    sampling = {"temperature": 0.0, "max_new_tokens": 1}
    answer = await client.generate({"input_ids": PROMPT, "sampling_params": sampling, "return_logprob": True})
    log_prob, token, _ = answer["meta_info"]["output_token_logprobs"][0]
    return token, log_prob, answer["meta_info"]


async def check_that_updates_change_what_is_sampled(fleet: Fleet) -> None:
    async with fleet.client() as client:
        for _ in range(2):
            before = await next_token(client)  # also puts the prompt into the prefix cache
            fleet.trainer.step()
            outcome = await fleet.update()
            assert outcome.succeeded and outcome.verified, outcome.error
            token, log_prob, meta = await next_token(client)
            wanted = fleet.trainer.next_log_probs(PROMPT)
            assert token == int(wanted.argmax()) and abs(log_prob - float(wanted.max())) < 1e-4
            assert meta["weight_version"] == str(fleet.version)
            assert abs(log_prob - before[1]) > 1e-3


def test_after_an_update_the_same_prompt_is_answered_by_the_new_weights(honest):
    asyncio.run(check_that_updates_change_what_is_sampled(honest))


@pytest.mark.parametrize("family", ["qwen2", "qwen3_moe"])
def test_tied_embeddings_and_experts_are_updated_too(start, family):
    asyncio.run(check_that_updates_change_what_is_sampled(start(family, ())))


@pytest.mark.parametrize("mode", ["retract", "in_place"])
async def test_requests_in_flight_live_through_an_update_and_record_both_versions(honest, mode):
    count, length = 16, 120
    sampling = {"temperature": 1.0, "max_new_tokens": length, "ignore_eos": True}
    begun = [asyncio.Event() for _ in range(count)]

    async def generate(client: EngineClient, i: int) -> dict:
        payload = {"input_ids": PROMPT[i:], "sampling_params": sampling | {"sampling_seed": i}}
        last: dict = {}
        async for chunk in client.generate_stream(payload):
            begun[i].set()
            last = chunk
        return last

    async with honest.client() as client:
        tasks = [asyncio.create_task(generate(client, i)) for i in range(count)]
        await asyncio.gather(*(event.wait() for event in begun))
        honest.trainer.step()
        outcome = await honest.update(pause_generation_mode=mode)
        assert outcome.succeeded, outcome.error
        old, new = str(honest.version - 1), str(honest.version)
        for answer in await asyncio.gather(*tasks):
            meta = answer["meta_info"]
            assert meta["finish_reason"]["type"] == "length" and len(answer["output_ids"]) == length
            spans = [(s["version"], s["start"], s["end"]) for s in meta["weight_versions"]]
            assert [s[0] for s in spans] == [old, new] and spans[0][2] == spans[1][1] and spans[1][2] == length


async def test_the_preflight_passes_for_an_honest_engine(honest):
    outcome = await honest.update(check_weight_update_equal)
    assert outcome.committed == {0} and outcome.verified, outcome.error
    async with honest.client() as client:  # no noise is left
        _, log_prob, _ = await next_token(client)
        assert abs(log_prob - float(honest.trainer.next_log_probs(PROMPT).max())) < 1e-4


def test_engines_that_lie_are_fenced_and_the_honest_one_serves(start):
    lies = [("drop_tensor=model.norm.weight",), ("corrupt_tensor=lm_head.weight",), ("ack_without_loading",)]
    fleet = start("qwen3", (), *lies)

    async def check() -> None:
        # The preflight first: the weights are those the engines loaded, and without noise the dropped tensor would pass.
        outcome = await fleet.update(check_weight_update_equal)
        assert (outcome.committed, outcome.fenced) == (set(), {0, 1, 2, 3}) and outcome.failures.keys() == {1, 2, 3}
        fleet.trainer.step()
        outcome = await fleet.update()
        assert (outcome.committed, outcome.fenced) == ({0}, {1, 2, 3})
        assert "1 of 25 tensors are not what the trainer sent:\n  model.norm.weight" in outcome.failures[1]
        assert "1 of 25 tensors are not what the trainer sent:\n  lm_head.weight" in outcome.failures[2]
        assert "25 of 25 tensors" in outcome.failures[3]
        async with fleet.client(0) as honest, fleet.client(1) as liar:
            assert (await honest.model_info())["weight_version"] == "1"
            assert (await liar.model_info())["weight_version"] == "0"
            with pytest.raises(EngineTimeout):  # it is still paused
                await liar.generate({"input_ids": PROMPT}, timeout_s=0.5)

    asyncio.run(check())


@pytest.mark.parametrize(("fault", "limit_s"), [("die_on_update", 20.0), ("hang_on_update", 4.0)])
def test_an_engine_that_dies_or_hangs_in_the_update_ends_it_and_is_named(start, fault, limit_s):
    fleet = start("qwen3", (fault,))
    fleet.trainer.step()
    started = time.monotonic()
    outcome = asyncio.run(fleet.update(weight_update_timeout=limit_s))
    assert time.monotonic() - started < 15
    assert not outcome.succeeded and outcome.fenced == {0}
    assert "bucket" in outcome.error and "engine 0" in outcome.error
