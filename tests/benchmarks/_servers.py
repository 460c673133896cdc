"""Engine servers for benchmarks, and one call after another to them."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Coroutine, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from miles.backends.engine_api.capabilities import Capabilities, probe
from miles.backends.engine_api.client import EngineClient
from miles.backends.engine_api.launcher import EngineProcess, load_launcher, wait_ready
from miles.utils.process import terminate

ADMIN_KEY = "benchmark"


@dataclass
class Server:
    name: str
    process: EngineProcess
    capabilities: Capabilities | None = None

    def client(self) -> EngineClient:
        return EngineClient(self.process.url, admin_key=ADMIN_KEY)

    def call(self, work: Callable[[EngineClient], Coroutine[Any, Any, Any]], timeout_s: float = 300) -> Any:
        """What `work(client)` returns, in an event loop of its own."""

        async def run() -> Any:
            async with self.client() as client:
                return await asyncio.wait_for(work(client), timeout_s)

        return asyncio.run(run())

    def wait(self, timeout_s: float = 400) -> Server:
        """Return when it is up."""

        async def ready(client: EngineClient) -> None:
            await wait_ready(client, self.process, timeout_s)
            self.capabilities = await probe(client)

        self.call(ready, timeout_s + 30)
        return self


@contextlib.contextmanager
def server(engine: str, model: Path, folder: Path, name: str | None = None, **flags: Any) -> Iterator[Server]:
    """A started server, not waited for; ended with the block. `flags`: attributes of args, `sglang_dtype="float32"` say."""
    name = name or engine
    args = SimpleNamespace(**{"rollout_seed": 1, "train_device": "cuda"} | flags)
    process = load_launcher(engine)(
        args, index=0, host="127.0.0.1", port=0, admin_key=ADMIN_KEY, model_path=str(model),
        log_path=folder / f"{name}.log", weight_version=0,
    )  # fmt: skip
    try:
        yield Server(name, process)
    finally:
        terminate(process.process)


def flags_of(texts: list[str]) -> dict[str, Any]:
    """`["sglang_dtype=float32", "sglang_disable_cuda_graph=true"]` as attributes."""
    switches = {"true": True, "false": False}
    pairs = (text.partition("=") for text in texts)
    return {name: switches.get(value, value) for name, _, value in pairs}
