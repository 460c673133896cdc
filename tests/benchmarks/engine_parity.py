"""The embedded engine and SGLang, call by call: the same request to both, and what differs.

    python -m tests.benchmarks.engine_parity [--device cpu|cuda] [--sglang-python PATH] [--engine-flag NAME=VALUE ...]

A tiny random model on both: in fp32 on a CPU, in fp16 on a GPU, where SGLang's kernels have no fp32. A row passes when both engines
answer with the same fields, tokens, texts and finish reasons, and log-probs that differ by no more than the tolerance
(2e-5 in fp32, 2e-2 in fp16). Control calls pass when both do what is asked, or refuse it with the same kind of error. The last line is one
JSON object.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from miles.backends.engine_api.client import EngineClient, EngineRejected
from miles.weight_update.transaction import run_update
from miles.weight_update.types import EngineEndpoint
from miles.weight_update.updater import WeightUpdater
from tests.benchmarks._servers import ADMIN_KEY, Server, flags_of, server
from tests.e2e.sglang.test_parity import _FREE, OTHER, PROMPT, REQUESTS
from tests.fast.weight_update.test_embedded_engine import Trainer
from tests.helpers.tiny_models import make_tiny_model
from tests.helpers.update_args import update_args

# What a server's version lacks, by the name of the field; noted in the table, and no failure.
LACKING = {"weight_versions": "SGLang before 0.5.21 says the version at the end alone, not each token's"}
TOLERANCE = {"cpu": 2e-5, "cuda": 2e-2}
DTYPE = {"cpu": "float32", "cuda": "float16"}


def differences(ours: Any, theirs: Any, where: str = "answer") -> tuple[list[str], float]:
    """What is not equal, and the largest distance of two numbers that are no counts."""
    if isinstance(ours, dict) and isinstance(theirs, dict):
        ours = {name: value for name, value in ours.items() if name in theirs or name not in LACKING}
        names = [f"{where}.{n} is on one side only" for n in sorted((ours.keys() ^ theirs.keys()) - _FREE)]
        found = [differences(ours[k], theirs[k], f"{where}.{k}") for k in sorted(ours.keys() & theirs.keys() - _FREE)]
        return names + [text for texts, _ in found for text in texts], max((d for _, d in found), default=0.0)
    if isinstance(ours, list) and isinstance(theirs, list):
        if len(ours) != len(theirs):
            return [f"{where} has {len(ours)} and {len(theirs)} entries"], 0.0
        found = [differences(a, b, f"{where}[{i}]") for i, (a, b) in enumerate(zip(ours, theirs, strict=True))]
        return [text for texts, _ in found for text in texts], max((d for _, d in found), default=0.0)
    if isinstance(ours, float) and isinstance(theirs, float):
        return [], 0.0 if ours == theirs or (math.isnan(ours) and math.isnan(theirs)) else abs(ours - theirs)
    return ([] if ours == theirs else [f"{where}: {ours!r} and {theirs!r}"]), 0.0


def generation(input_ids: Any, changes: dict[str, Any]) -> Callable:
    sampling = {"max_new_tokens": 8, "temperature": 0.0, "ignore_eos": True} | changes.get("sampling_params", {})
    body = {"input_ids": input_ids, "return_logprob": True} | changes | {"sampling_params": sampling}
    return lambda client: client.generate(body)


async def stream(client: EngineClient) -> Any:
    sampling = {"max_new_tokens": 6, "temperature": 0.0, "ignore_eos": True}
    return [c async for c in client.generate_stream({"input_ids": PROMPT, "sampling_params": sampling})][-1]


def refused(call: Callable) -> Callable:
    async def status(client: EngineClient) -> Any:
        try:
            return {"not refused": bool(await call(client))}
        except EngineRejected as error:
            return {"status": error.status}
        except ValueError:
            return {"status": "refused before it is sent"}

    return status


async def pause_and_go_on(client: EngineClient, mode: str) -> Any:
    """A request in flight lives through a pause, whole."""
    body = {"input_ids": PROMPT, "sampling_params": {"max_new_tokens": 400, "temperature": 0.0, "ignore_eos": True}}
    running = asyncio.create_task(client.generate(body))
    await asyncio.sleep(0.15)
    await client.pause(mode)
    await asyncio.sleep(0.3)
    held = not running.done()
    await client.alive(timeout_s=5)
    await client.continue_()
    answer = await running
    return {"held": held, "tokens": len(answer["output_ids"]), "finish": answer["meta_info"]["finish_reason"]["type"]}


async def abort(client: EngineClient) -> Any:
    body = {
        "input_ids": PROMPT,
        "sampling_params": {"max_new_tokens": 1900, "ignore_eos": True},
        "return_logprob": True,
    }
    running = [asyncio.create_task(client.generate(body | {"rid": rid})) for rid in ("parity-1", "parity-2")]
    await asyncio.sleep(0.4)
    await client.abort("parity-1")
    first = await running[0]
    await client.abort(abort_all=True)
    answers = [first, await running[1]]
    return [
        {"finish": a["meta_info"]["finish_reason"]["type"], "partial": 0 < len(a["output_ids"]) < 1900} for a in answers
    ]


async def memory(client: EngineClient) -> Any:
    """Everything released and taken again (the weights' contents come with the next update)."""
    await client.flush()
    await client.release_memory()
    await client.resume_memory(["weights"])
    await client.resume_memory(["cuda_graph", "kv_cache"])
    return "done"


async def versions(client: EngineClient) -> Any:
    await client.update_weight_version(41)
    answer = await client.generate({"input_ids": OTHER, "sampling_params": {"max_new_tokens": 1}})
    return answer["meta_info"]["weight_version"]


async def flush(client: EngineClient) -> Any:
    await client.flush()
    return "done"


async def wrong_key(client: EngineClient) -> Any:
    async with EngineClient(client.base_url) as stranger:
        return await refused(lambda c: c.pause("retract"))(stranger)


def calls() -> dict[str, Callable]:
    table = {f"generate: {name}": generation(*request) for name, request in REQUESTS.items()}
    table["generate: sampled tokens' log-probs"] = generation(
        PROMPT,
        {
            "token_ids_logprob": [9],
            "sampling_params": {"temperature": 0.7, "max_new_tokens": 1, "logit_bias": {"9": 100.0}},
        },
    )
    table["stream"] = stream
    bad = {"temperature": {"temperature": -1}, "top_p": {"top_p": 0.0}, "max_new_tokens": {"max_new_tokens": -1}}
    table |= {f"refuse: bad {n}": refused(generation(PROMPT, {"sampling_params": p})) for n, p in bad.items()}
    table["refuse: prompt too long"] = refused(generation([5] * 3000, {}))
    table["refuse: another run's key"] = wrong_key
    table |= {f"pause: {mode}": lambda c, mode=mode: pause_and_go_on(c, mode) for mode in ("retract", "in_place")}
    table |= {"abort one, abort all": abort, "flush": flush, "weight version": versions}
    return table


def update_row(servers: list[Server], model: Path, transport: str, device: str) -> Callable[[Server], Any]:
    """One verified update by `transport`; afterwards the engine generates from the new weights."""
    trainer = Trainer(model)
    trainer.step()
    if device == "cuda":
        kept = [(name, tensor.to("cuda", torch.float16)) for name, tensor in trainer.iter_weights()]
        trainer.iter_weights = lambda: iter(kept)  # type: ignore[method-assign]

    def run(running: Server) -> Any:
        assert running.capabilities is not None
        endpoint = EngineEndpoint(0, running.process.url, ADMIN_KEY, 1, 0, running.capabilities.digests)
        args = update_args(
            update_weight_transfer_mode=transport, train_device=device, colocate=True, weight_update_timeout=60.0
        )
        updater = WeightUpdater(args, trainer)

        async def go() -> Any:
            async def transfer() -> Any:
                return await asyncio.to_thread(updater.transfer, 50, [endpoint])

            return await run_update(args, 50, [endpoint], transfer)

        try:
            outcome = asyncio.run(go())
        finally:
            updater.close()
        answer = running.call(generation(PROMPT, {}))
        return {"verified": outcome.verified, "error": outcome.error, "answer": answer}

    return run


def row(work: Callable[[Server], Any], servers: list[Server], tolerance: float) -> dict[str, Any]:
    answers: list[Any] = []
    for running in servers:
        try:
            answers.append(work(running))
        except Exception as error:
            return {"passes": False, "why": f"{running.name}: {type(error).__name__}: {str(error)[:300]}"}
    wrong, distance = differences(*answers)
    return {"passes": not wrong and distance <= tolerance, "max_difference": distance} | (
        {"why": wrong[:5]} if wrong else {}
    )


def table(servers: list[Server], model: Path, device: str) -> dict[str, dict[str, Any]]:
    rows = {}
    for name, call in calls().items():
        rows[name] = row(lambda s, call=call: s.call(call, 60), servers, TOLERANCE[device])
        show(name, rows[name])
    updates = {f"update: {t}": update_row(servers, model, t, device) for t in ("broadcast", "ipc")}
    for name, work in ({"memory: release, resume": lambda s: s.call(memory, 60)} | updates).items():
        rows[name] = row(work, servers, TOLERANCE[device])
        show(name, rows[name])
    return rows


def show(name: str, result: dict[str, Any]) -> None:
    mark = "ok  " if result["passes"] else "FAIL"
    print(f"{mark} {name:42s} {result.get('max_difference', math.nan):.1e} {result.get('why', '')}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--sglang-python")
    parser.add_argument("--engine-flag", action="append", default=[], metavar="NAME=VALUE")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        # Spread logits: on flat ones, rounding alone would choose the likeliest token.
        sizes = {"hidden_size": 128, "intermediate_size": 256, "head_dim": 32, "initializer_range": 0.3}
        dtype = DTYPE[options.device]
        model = make_tiny_model(folder / "model", "qwen3", dtype=dtype, **sizes)
        common = {
            "train_device": options.device,
            "sglang_python": options.sglang_python,
            "offload_rollout": options.device == "cuda",
        }
        common |= {"sglang_dtype": dtype, "embedded_dtype": dtype} | flags_of(options.engine_flag)
        with server("sglang", model, folder, **common) as theirs, server("embedded", model, folder, **common) as ours:
            rows = table([ours.wait(), theirs.wait()], model, options.device)
            versions = {s.capabilities.server: s.capabilities.version for s in (ours, theirs) if s.capabilities}
    passed = sum(r["passes"] for r in rows.values())
    result = {
        "benchmark": "engine_parity",
        "device": options.device,
        "versions": versions,
        "dtype": dtype,
        "tolerance": TOLERANCE[options.device],
    }
    print(json.dumps(result | {"passed": passed, "calls": len(rows), "rows": rows}))


if __name__ == "__main__":
    main()
