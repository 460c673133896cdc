"""A real SGLang server and an embedded engine of the same tiny model, side by side.

SGLang has an environment of its own: `.venv-sglang`, or the interpreter that MILES_TEST_SGLANG_PYTHON names.
"""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from miles.backends.engine_api.capabilities import Capabilities, probe
from miles.backends.engine_api.client import EngineClient
from miles.backends.engine_api.launcher import EngineProcess, load_launcher, wait_ready
from miles.utils.process import terminate
from miles.weight_update.types import EngineEndpoint
from tests.helpers.tiny_models import make_tiny_model

REPO = Path(__file__).resolve().parents[3]
ENGINES = ("embedded", "sglang")


def find_sglang() -> str | None:
    candidates = [os.environ.get("MILES_TEST_SGLANG_PYTHON"), str(REPO / ".venv-sglang" / "bin" / "python")]
    candidates += [sys.executable] if find_spec("sglang") else []
    return next((c for c in candidates if c and os.access(c, os.X_OK)), None)


@pytest.fixture(scope="session")
def sglang_python() -> str:
    python = find_sglang()
    if python is None:
        pytest.skip(
            "no SGLang: run `bash scripts/install_sglang_cpu.sh`, or name an interpreter that has it in "
            "MILES_TEST_SGLANG_PYTHON"
        )
    return python


@dataclass
class Server:
    """A running engine. `call(lambda client: ...)` runs one call, or several, in an event loop of its own."""

    name: str
    process: EngineProcess
    model_dir: Path
    capabilities: Capabilities | None = None

    def client(self) -> EngineClient:
        return EngineClient(self.process.url, admin_key="key", vocab_size=320)

    def call(self, work: Callable[[EngineClient], Coroutine[Any, Any, Any]]) -> Any:
        async def run() -> Any:
            async with self.client() as client:
                return await asyncio.wait_for(work(client), 40)

        return asyncio.run(run())

    def generate(self, input_ids: list, **payload: Any) -> Any:
        sampling = {"max_new_tokens": 8, "temperature": 0.0, "ignore_eos": True} | payload.pop("sampling_params", {})
        body = {"input_ids": input_ids, "sampling_params": sampling, "return_logprob": True} | payload
        return self.call(lambda client: client.generate(body))

    def endpoint(self, index: int = 0) -> EngineEndpoint:
        assert self.capabilities is not None
        return EngineEndpoint(index, self.process.url, "key", 1, 0, self.capabilities.digests)


def start(name: str, python: str | None, model_dir: Path, folder: Path, **flags: Any) -> Server:
    args = SimpleNamespace(sglang_python=python, train_device="cpu", rollout_seed=1, **flags)
    process = load_launcher(name)(
        args, index=0, host="127.0.0.1", port=0, admin_key="key", model_path=str(model_dir),
        log_path=folder / f"{name}.log", weight_version=0,
    )  # fmt: skip
    return Server(name, process, model_dir)


def wait(server: Server) -> Server:
    async def ready(client: EngineClient) -> None:
        await wait_ready(client, server.process, 400)
        server.capabilities = await probe(client)

    async def run() -> None:
        async with server.client() as client:
            await ready(client)

    asyncio.run(run())
    return server


@pytest.fixture(scope="session")
def servers(sglang_python, tmp_path_factory):
    """Both engines, by name."""
    folder = tmp_path_factory.mktemp("servers")
    model_dir = make_tiny_model(folder / "model", "qwen3")
    started = {name: start(name, sglang_python, model_dir, folder) for name in ENGINES}
    try:
        yield {name: wait(server) for name, server in started.items()}
    finally:
        for server in started.values():
            terminate(server.process.process)
