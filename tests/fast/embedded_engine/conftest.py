"""Tiny models, an engine's scheduler driven by hand, and one real server for the HTTP tests."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from miles.backends.embedded_engine.forward import Model
from miles.backends.embedded_engine.launch import launch
from miles.backends.embedded_engine.model_config import load_model_config
from miles.backends.embedded_engine.request import Request
from miles.backends.embedded_engine.sampling_params import parse_sampling_params
from miles.backends.embedded_engine.scheduler import Scheduler, SchedulerLimits
from miles.backends.embedded_engine.weights import Weights, load_directory
from miles.backends.engine_api.client import EngineClient
from miles.backends.engine_api.launcher import EngineProcess, wait_ready
from miles.utils.process import terminate
from tests.helpers.tiny_models import FAMILIES, make_tiny_model

ADMIN_KEY = "only-this-test"
_ids = itertools.count()


@pytest.fixture(scope="session")
def model_dirs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """One directory a family; wide random weights, so that the next token is rarely a foregone conclusion."""
    torch.set_num_threads(1)
    root = tmp_path_factory.mktemp("models")
    return {family: make_tiny_model(root / family, family, initializer_range=0.15) for family in FAMILIES}


def make_model(path: Path) -> Model:
    config = load_model_config(path)
    weights = Weights(config, torch.device("cpu"), torch.float32)
    load_directory(weights, path)
    return Model(config, weights)


def make_scheduler(path: Path, **limits: Any) -> Scheduler:
    defaults = {"max_running_requests": 64, "max_total_tokens": 16384, "chunked_prefill_size": 2048}
    return Scheduler(make_model(path), SchedulerLimits(**(defaults | limits)))


def make_request(
    ids: list[int], *, vocab: int = 320, emit: Callable[[Request], None] | None = None, **options: Any
) -> Request:
    """Sampling parameters and Request fields, mixed."""
    fields = {name: options.pop(name) for name in list(options) if name in Request.__dataclass_fields__}
    params = parse_sampling_params({"temperature": 1.0, "sampling_seed": 7} | options, vocab)
    fields = {"rid": f"r{next(_ids)}", "return_logprob": True, "stop_ids": frozenset(params.stop_token_ids)} | fields
    return Request(
        input_ids=ids, params=params, seed=(params.sampling_seed or 0) % 2**64, emit=emit or (lambda _: None), **fields
    )


def run(scheduler: Scheduler, *requests: Request, limit: int = 5000) -> list[Request]:
    for request in requests:
        scheduler.add(request)
    with torch.inference_mode():
        for _ in range(limit):
            if all(r.finished for r in requests):
                return list(requests)
            scheduler.step()
    raise AssertionError(f"not finished after {limit} steps")


def prompt(length: int, seed: int = 0, vocab: int = 320) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, vocab, (length,), generator=generator).tolist()


# ---- one real server -------------------------------------------------------------------------------------------------


class Server:
    """A server process and a way to call it from synchronous tests."""

    def __init__(self, process: EngineProcess, model_path: Path):
        self.process, self.url, self.model_path = process, process.url, model_path

    def call(self, method: str, *args: Any, **kwargs: Any) -> Any:
        """A method of EngineClient, with the admin key."""

        async def run_call() -> Any:
            async with EngineClient(self.url, admin_key=ADMIN_KEY, request_timeout_s=60, retries=0) as client:
                return await getattr(client, method)(*args, **kwargs)

        return asyncio.run(run_call())


def start_server(model_path: Path, log_path: Path, *faults: str, **options: Any) -> Server:
    args = SimpleNamespace(train_device="cpu", weight_update_timeout=6.0, **options)
    process = launch(
        args, index=0, host="127.0.0.1", port=0, admin_key=ADMIN_KEY, model_path=str(model_path), log_path=log_path,
        weight_version=0, faults=faults,
    )  # fmt: skip

    async def ready() -> None:
        async with EngineClient(process.url, admin_key=ADMIN_KEY) as client:
            await wait_ready(client, process, 120.0)

    try:
        asyncio.run(ready())
    except BaseException:
        terminate(process.process)
        raise
    return Server(process, model_path)


@pytest.fixture(scope="session")
def server(model_dirs: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    started = start_server(model_dirs["qwen3"], tmp_path_factory.mktemp("server") / "engine.log")
    yield started
    terminate(started.process.process)
