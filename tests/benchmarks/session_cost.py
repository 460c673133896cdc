"""What a session server costs a turn, beside a bare proxy that parses and forwards the same bodies.

    python -m tests.benchmarks.session_cost [--concurrency 1 64 1024] [--history 2000 16000 32000] [--turns N]

Clients speak to the server, and the server to an engine that answers at once, all over HTTP in processes of their own. CPU is
the server's process alone; latency is what a client waits. The limit is twice the proxy's CPU a turn. What grows with a
conversation is measured in one process, without HTTP: turn 64 beside turn 4, the tokens each has to make, bytes a token.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import random
import tempfile
import time
from collections.abc import Awaitable, Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import aiohttp
import orjson
import psutil

from miles.rollout.session.config import SessionConfig
from miles.utils.process import terminate
from tests.benchmarks._session_parts import make_tokenizer, start, texts, words_of

LIMIT = 2.0
_KEY = "benchmark"
_MESSAGE = 900  # characters, about 230 tokens


@dataclass
class Cell:
    """CPU in ms a turn, latency in ms, turns/s a core."""

    cpu_ms: float
    p50_ms: float
    p99_ms: float
    turns_per_core_s: float


@dataclass
class Conversation:
    """One client's: messages are kept as the JSON that they are sent in."""

    url: str
    parts: list[bytes] = field(default_factory=list)

    def body(self) -> bytes:
        return b'{"model":"m","max_tokens":512,"messages":[' + b",".join(self.parts) + b"]}"

    async def turn(self, http: aiohttp.ClientSession, follow_up: str) -> float:
        """Ask, remember what was said, and what will be asked next. Returns seconds."""
        started = time.perf_counter()
        async with http.post(self.url, data=self.body(), headers={"content-type": "application/json"}) as reply:
            answer = await reply.read()
            if reply.status != 200:
                raise RuntimeError(f"{self.url} answered with {reply.status}: {answer[:500]!r}")
        seconds = time.perf_counter() - started
        said = orjson.loads(answer)["choices"][0]["message"]
        self.parts += [orjson.dumps(said), orjson.dumps({"role": "user", "content": follow_up})]
        return seconds


def history(rng: random.Random, source: str, tokens: int) -> list[dict[str, Any]]:
    """A conversation that ends with a question, of about so many tokens."""
    count = max(tokens * 4 // _MESSAGE, 1) | 1
    roles = ("user", "assistant")
    return [{"role": roles[i % 2], "content": words_of(rng, source, _MESSAGE)} for i in range(count)]


async def bounded(work: list[Awaitable[Any]], limit: int) -> list[Any]:
    gate = asyncio.Semaphore(limit)

    async def one(job: Awaitable[Any]) -> Any:
        async with gate:
            return await job

    return await asyncio.gather(*(one(job) for job in work))


def cpu_seconds(process: psutil.Process) -> float:
    """Of all its threads, to the nanosecond where the kernel tells, else to the hundredth of a second."""
    try:
        stats = Path(f"/proc/{process.pid}/task").glob("*/schedstat")
        return sum(int(stat.read_text().split()[0]) for stat in stats) / 1e9
    except OSError:
        times = process.cpu_times()
        return times.user + times.system


async def measure(
    process: psutil.Process, made: list[Conversation], turns: int, concurrency: int, follow_up: str
) -> Cell:
    """`turns` turns of each conversation, `concurrency` conversations at a time, after one that is not counted."""
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(total=600)) as http:

        async def talk(one: Conversation, count: int) -> list[float]:
            return [await one.turn(http, follow_up) for _ in range(count)]

        await bounded([talk(one, 1) for one in made], min(concurrency, 8))
        before = cpu_seconds(process)
        seconds = await bounded([talk(one, turns) for one in made], concurrency)
        cpu = cpu_seconds(process) - before
    waits = sorted(1000 * s for each in seconds for s in each)
    return Cell(
        cpu_ms=round(1000 * cpu / len(waits), 3),
        p50_ms=round(median(waits), 2),
        p99_ms=round(waits[min(int(len(waits) * 0.99), len(waits) - 1)], 2),
        turns_per_core_s=round(len(waits) / cpu),
    )


class Bench:
    """The three processes, and one cell of the table after another."""

    def __init__(self, folder: Path) -> None:
        self.tokenizer = make_tokenizer(folder / "tokenizer")
        self.source = "\n".join(texts())
        config = SessionConfig(
            str(self.tokenizer), tito_model="smollm2", context_length=200_000, key=_KEY, log_dir=str(folder / "log")
        )
        (folder / "config.json").write_text(json.dumps(asdict(config)))
        parts = "tests.benchmarks._session_parts"
        engine, engine_url = start(parts, folder / "engine.log", "engine", "--tokenizer", str(self.tokenizer))
        proxy, proxy_url = start(parts, folder / "proxy.log", "proxy", "--engine", engine_url)
        server, server_url = start(
            "miles.rollout.session.serve", folder / "server.log", "--config", str(folder / "config.json")
        )
        self.processes = [engine, proxy, server]
        self.engine, self.proxy_url, self.server_url = engine_url, proxy_url, server_url
        self.proxy, self.server = psutil.Process(proxy.pid), psutil.Process(server.pid)

    def close(self) -> None:
        for process in self.processes:
            terminate(process)

    async def _call(self, method: str, path: str, body: Any = None) -> Any:
        headers = {"authorization": f"Bearer {_KEY}"}
        async with (
            aiohttp.ClientSession(headers=headers) as http,
            http.request(method, self.server_url + path, json=body) as reply,
        ):
            reply.raise_for_status()
            return orjson.loads(await reply.read() or b"null")

    async def ready(self, timeout_s: float = 120) -> None:
        deadline = time.monotonic() + timeout_s
        while True:
            try:
                await self._call("PUT", "/engines", {"0": {"url": self.engine, "dp_ranks": 1}})
                return
            except aiohttp.ClientError:
                if time.monotonic() > deadline:
                    raise
                await asyncio.sleep(0.1)

    def _conversations(self, urls: list[str], tokens: int) -> list[Conversation]:
        rng = random.Random(tokens)
        return [Conversation(url, [orjson.dumps(m) for m in history(rng, self.source, tokens)]) for url in urls]

    async def cell(self, concurrency: int, tokens: int, turns: int) -> dict[str, Any]:
        sessions = max(concurrency, 24)
        follow_up = words_of(random.Random(7), self.source, 300)
        paths = []
        for _ in range(sessions):
            made = await self._call("POST", "/sessions", {"seed": 1})
            paths.append(f"/sessions/{made['session_id']}.{made['api_key']}")
        before = self.server.memory_info().rss
        urls = [f"{self.server_url}{path}/v1/chat/completions" for path in paths]
        ours = await measure(self.server, self._conversations(urls, tokens), turns, concurrency, follow_up)
        grown = self.server.memory_info().rss - before
        held = await self._call("GET", "/health")
        for path in paths:
            await self._call("DELETE", path)
        urls = [f"{self.proxy_url}/v1/chat/completions"] * sessions
        bare = await measure(self.proxy, self._conversations(urls, tokens), turns, concurrency, follow_up)
        return {
            "concurrency": concurrency,
            "history": tokens,
            "ratio": round(ours.cpu_ms / bare.cpu_ms, 2),
            "server": asdict(ours),
            "proxy": asdict(bare),
            "rss_mib": round(grown / 2**20, 1),
            "held_mib": round(held["bytes"] / 2**20, 1),
        }


# ---- what grows with a conversation ------------------------------------------------------------------------------------


def growth(tokenizer: Path, source: str, answer: dict[str, Any]) -> dict[str, Any]:
    """One process, no HTTP: the cost of turns 4 and 64, the tokens that each made, and bytes a token of many sessions."""
    from miles.rollout.session.serve import build_service, load_tito
    from miles.rollout.session.turns import ChatRequest

    class Upstream:
        async def generate(self, payload: dict[str, Any], key: str) -> dict[str, Any]:
            return answer

    config = SessionConfig(str(tokenizer), tito_model="smollm2", context_length=200_000)
    tito = load_tito(config)
    encoded: list[int] = []
    native = tito.encoder.encode
    tito.encoder.encode = lambda text: _counted(native(text), encoded)  # type: ignore[method-assign]
    service = build_service(config, tito, Upstream())  # type: ignore[arg-type]
    rng = random.Random(3)

    def turn(session: Any, messages: list[dict[str, Any]]) -> float:
        started = time.perf_counter()
        prepared = service.recorder.prepare(session, ChatRequest(list(messages)))
        said = service.recorder.finish(session, prepared, answer)
        seconds = time.perf_counter() - started
        messages += [dict(said.message), {"role": "user", "content": words_of(rng, source, 300)}]
        return seconds

    at: dict[int, list[float]] = {4: [], 64: []}
    made: dict[int, list[int]] = {4: [], 64: []}
    for _ in range(8):
        session, messages = service.store.create(seed=1), [{"role": "user", "content": words_of(rng, source, 300)}]
        for n in range(1, 68):
            encoded.clear()
            seconds = turn(session, messages)
            for place in at:
                if place <= n < place + 4:
                    at[place].append(seconds)
                    made[place].append(sum(encoded))
    return {
        "turn_us": {str(n): round(1e6 * median(v)) for n, v in at.items()},
        "tokens_made": {str(n): round(median(v)) for n, v in made.items()},
        "turn_64_over_4": round(median(at[64]) / median(at[4]), 2),
        "bytes_per_token": _bytes_per_token(service, turn, source, rng),
    }


def _counted(ids: list[int], into: list[int]) -> list[int]:
    into.append(len(ids))
    return ids


def _bytes_per_token(service: Any, turn: Callable[..., float], source: str, rng: random.Random) -> float:
    """Growth of the process a token of 100 sessions of 16 turns."""
    gc.collect()
    before, tokens = psutil.Process().memory_info().rss, 0
    for _ in range(100):
        session, messages = service.store.create(seed=1), [{"role": "user", "content": words_of(rng, source, 4000)}]
        for _ in range(16):
            # As from HTTP: every request brings its own objects.
            messages = orjson.loads(orjson.dumps(messages))
            turn(session, messages)
        tokens += session.history.head.row_length
    gc.collect()
    return round((psutil.Process().memory_info().rss - before) / tokens, 1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--concurrency", type=int, nargs="+", default=[1, 64, 1024])
    parser.add_argument("--history", type=int, nargs="+", default=[2000, 16000, 32000])
    parser.add_argument("--turns", type=int, default=4)
    options = parser.parse_args()
    from tests.benchmarks._session_parts import canned_answers

    async def run(bench: Bench) -> list[dict[str, Any]]:
        await bench.ready()
        cells = []
        for concurrency in options.concurrency:
            for tokens in options.history:
                cells.append(await bench.cell(concurrency, tokens, options.turns))
                print(json.dumps(cells[-1]), flush=True)
        return cells

    with tempfile.TemporaryDirectory() as folder:
        bench = Bench(Path(folder))
        try:
            cells = asyncio.run(run(bench))
        finally:
            bench.close()
        grows = growth(bench.tokenizer, bench.source, orjson.loads(canned_answers(str(bench.tokenizer))[0]))
    worst = max(cell["ratio"] for cell in cells)
    print(json.dumps({"benchmark": "session_cost", "cells": cells, **grows, "worst": worst, "limit": LIMIT,
                      "ratio": round(worst / LIMIT, 3)}))  # fmt: skip


if __name__ == "__main__":
    main()
