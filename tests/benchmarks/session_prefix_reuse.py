"""Whether a later turn of a session computes its suffix alone: cached tokens that the engine itself reports.

    python -m tests.benchmarks.session_prefix_reuse [--engine embedded] [--engine sglang --sglang-python PATH]

Four agents at once, 16 turns each, speak through a session server with two embedded engines, or with one SGLang, of a tiny
model. Of every prompt but the first, at least 95 % of the tokens must come from the cache, over the whole of each session.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import tempfile
from pathlib import Path
from typing import Any

import httpx

from miles.rollout.session.app import create_app
from miles.rollout.session.config import SessionConfig
from miles.rollout.session.serve import build_service, load_tito
from miles.rollout.session.upstream import Engines
from miles.router.members import EngineAddress
from tests.benchmarks._servers import Server, flags_of, server
from tests.helpers.tiny_models import make_tiny_model

LIMIT = 0.95
AGENTS, TURNS = 4, 16
_CONTEXT = 8192


async def converse(http: httpx.AsyncClient, key: str, agent: int) -> list[dict[str, Any]]:
    """One session; returns the engine's counters of each turn."""
    made = (await http.post("/sessions", json={"seed": agent}, headers={"authorization": f"Bearer {key}"})).json()
    base = f"/sessions/{made['session_id']}.{made['api_key']}"
    messages = [{"role": "user", "content": f"Agent {agent}: " + "what do you know of apples and pears? " * 40}]
    done = 0
    for _ in range(4 * TURNS):
        body = {"model": "m", "messages": messages, "max_tokens": 64, "temperature": 1.0, "stop": ["e", " "]}
        reply = await http.post(f"{base}/v1/chat/completions", json=body, timeout=300)
        reply.raise_for_status()
        said = reply.json()["choices"][0]
        if said["finish_reason"] == "length":
            continue  # the same request again takes it back
        done += 1
        if done == TURNS:
            break
        messages += [said["message"], {"role": "user", "content": f"and {done}?"}]
    records = (await http.get(base)).json()["records"]
    return [record["meta"] | {"own": len(record["prompt_ids"])} for record in records]


async def measure(model: Path, servers: list[Server]) -> dict[str, Any]:
    config = SessionConfig(str(model), tito_model="smollm2", context_length=_CONTEXT)
    engines = Engines(request_timeout_s=300, recovery_timeout_s=300)
    await engines.set({i: EngineAddress(s.process.url) for i, s in enumerate(servers)})
    app = create_app(build_service(config, load_tito(config), engines))
    transport = httpx.ASGITransport(app=app)
    async with httpx.AsyncClient(transport=transport, base_url="http://sessions") as http:
        sessions = await asyncio.gather(*(converse(http, config.key, agent) for agent in range(AGENTS)))
    await engines.close()
    shares, extra = [], []
    for turns in sessions:
        later = turns[1:]
        shares.append(sum(t.get("cached_tokens", 0) for t in later) / sum(t["prompt_tokens"] for t in later))
        extra += [t["prompt_tokens"] - t.get("cached_tokens", 0) - t["own"] for t in later]
    return {
        "engines": len(servers),
        "turns": [len(turns) for turns in sessions],
        "cached_share": [round(share, 4) for share in shares],
        "computed_again_max": max(extra),  # tokens of earlier turns that a turn computed again
    }


def run(engine: str, model: Path, folder: Path, flags: dict[str, Any]) -> dict[str, Any]:
    with server(engine, model, folder, f"{engine}-0", **flags) as first:
        if engine != "embedded":
            return asyncio.run(measure(model, [first.wait()]))
        with server(engine, model, folder, f"{engine}-1", **flags) as second:
            return asyncio.run(measure(model, [first.wait(), second.wait()]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engine", action="append", choices=("embedded", "sglang"))
    parser.add_argument("--sglang-python")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--engine-flag", action="append", default=[], metavar="NAME=VALUE", help="of SGLang")
    options = parser.parse_args()
    found = {}
    with tempfile.TemporaryDirectory() as folder:
        model = make_tiny_model(Path(folder) / "model", max_position_embeddings=_CONTEXT, initializer_range=0.15)
        for engine in options.engine or ["embedded"]:
            flags: dict[str, Any] = {"train_device": options.device}
            if engine == "sglang":
                flags |= {"sglang_python": options.sglang_python} | flags_of(options.engine_flag)
            found[engine] = run(engine, model, Path(folder), flags)
            print(json.dumps({engine: found[engine]}), flush=True)
    worst = min(share for one in found.values() for share in one["cached_share"])
    print(json.dumps({"benchmark": "session_prefix_reuse", **found, "worst": worst, "limit": LIMIT,
                      "ratio": round((1 - worst) / (1 - LIMIT), 3)}))  # fmt: skip


if __name__ == "__main__":
    main()
