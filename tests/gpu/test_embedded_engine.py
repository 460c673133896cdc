"""The embedded engine on a GPU: what it generates, how it takes weights from the trainer's memory, what it gives back."""

import asyncio

import pytest
import torch

from miles.weight_update.transaction import run_update
from miles.weight_update.types import EngineEndpoint
from miles.weight_update.updater import WeightUpdater
from tests.benchmarks._servers import ADMIN_KEY, server
from tests.fast.weight_update.test_embedded_engine import Trainer
from tests.helpers.tiny_models import make_tiny_model
from tests.helpers.update_args import update_args

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

PROMPTS = [list(range(10, 50)), list(range(100, 117)), [7, 5, 3]]


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory):
    return make_tiny_model(tmp_path_factory.mktemp("model"), hidden_size=256, intermediate_size=512, head_dim=64)


@pytest.fixture(scope="module", params=["float32", "bfloat16"])
def engine(request, model_dir, tmp_path_factory):
    folder = tmp_path_factory.mktemp("engine")
    flags = {"embedded_dtype": request.param, "embedded_max_total_tokens": 200_000}
    with server("embedded", model_dir, folder, **flags) as running:
        running.dtype = getattr(torch, request.param)
        yield running.wait()


class CudaTrainer(Trainer):
    """Its weights are on the GPU, in the dtype that the engine serves."""

    def __init__(self, directory, dtype) -> None:
        super().__init__(directory)
        self.model.to("cuda", dtype)

    def log_probs(self, tokens: list[int]) -> torch.Tensor:
        """Of every token after the first, by one full forward."""
        with torch.no_grad():
            logits = self.model(torch.tensor([tokens], device="cuda")).logits[0, :-1].float()
        return logits.log_softmax(-1).gather(1, torch.tensor(tokens[1:], device="cuda")[:, None])[:, 0].cpu()


def generate(engine, new_tokens=48):
    params = {"max_new_tokens": new_tokens, "temperature": 1.0, "ignore_eos": True}
    bodies = [{"input_ids": p, "sampling_params": params, "return_logprob": True} for p in PROMPTS]

    async def together(client):
        return await asyncio.gather(*(client.generate(body) for body in bodies))

    return engine.call(together)


def assert_scores_agree(engine, trainer):
    limit = 1e-3 if engine.dtype == torch.float32 else 0.05
    for prompt, answer in zip(PROMPTS, generate(engine), strict=True):
        got = torch.tensor([value for value, *_ in answer["meta_info"]["output_token_logprobs"]])
        wanted = trainer.log_probs(prompt + answer["output_ids"])[len(prompt) - 1 :]
        assert len(got) == 48 and (got - wanted).abs().max() < limit


def update(engine, trainer, version, transport):
    args = update_args(update_weight_transfer_mode=transport, train_device="cuda", colocate=True)
    endpoint = EngineEndpoint(0, engine.process.url, ADMIN_KEY, 1, 0, engine.capabilities.digests)
    updater = WeightUpdater(args, trainer)

    async def run():
        return await run_update(args, version, [endpoint], transfer)

    async def transfer():
        return await asyncio.to_thread(updater.transfer, version, [endpoint])

    try:
        return asyncio.run(run())
    finally:
        updater.close()


def test_log_probs_are_those_of_a_full_forward(engine, model_dir):
    trainer = CudaTrainer(model_dir, engine.dtype)
    outcome = update(engine, trainer, 1, "ipc")
    assert outcome.verified and outcome.error is None
    assert_scores_agree(engine, trainer)


@pytest.mark.parametrize("transport", ["ipc", "broadcast"])
def test_new_weights_arrive_whole_and_are_what_it_generates_from(engine, model_dir, transport):
    trainer = CudaTrainer(model_dir, engine.dtype)
    with torch.no_grad():
        for parameter in trainer.model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.05)
    version = {"ipc": 2, "broadcast": 3}[transport]
    outcome = update(engine, trainer, version, transport)
    assert outcome.verified and outcome.error is None and outcome.committed == {0}
    assert_scores_agree(engine, trainer)


def test_released_memory_is_free_for_others_and_comes_back(engine, model_dir):
    trainer = CudaTrainer(model_dir, engine.dtype)

    async def release(client):
        await client.flush()
        await client.release_memory()

    async def resume(client):
        await client.resume_memory(["weights"])
        await client.resume_memory(["kv_cache", "cuda_graph"])

    assert update(engine, trainer, 4, "ipc").verified
    torch.cuda.synchronize()
    before = torch.cuda.mem_get_info()[0]
    engine.call(release)
    freed = torch.cuda.mem_get_info()[0] - before
    cache = 200_000 * 2 * 2 * 2 * 64 * engine.dtype.itemsize  # tokens, keys and values, layers, heads, sizes
    assert freed > 0.9 * cache
    engine.call(resume)
    assert update(engine, trainer, 5, "ipc").verified
    assert_scores_agree(engine, trainer)
