"""The embedded engine over HTTP, with log-probs, against transformers' padded batched `generate` without them.

    python -m tests.benchmarks.embedded_engine [--model tiny|smollm2|both] [--rounds N] [--engines N] [--num-threads N]

Both sides get the same model directory, prompts, sampling (temperature 1, no eos) and 2 cores: `generate` as 2 threads of one
batch, the engine as a fleet of `--engines` servers of `--num-threads` threads each that share the requests, which is how a
run uses several cores. They take turns; each side's median round counts. The prompts of a round are new and the prefix cache is
flushed before it, as after a weight update. The last line is one JSON object; `max_logprob_diff` compares the engine's
log-probs with a full forward pass of transformers over the same tokens.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import random
import statistics
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import uvloop

from miles.backends.embedded_engine.launch import launch
from miles.backends.engine_api.client import EngineClient
from miles.backends.engine_api.launcher import EngineProcess, wait_ready
from miles.utils.process import terminate

ADMIN_KEY = "benchmark"


@dataclass(frozen=True)
class Workload:
    requests: int
    prompt_tokens: tuple[int, int]
    new_tokens: int


WORKLOADS = {"tiny": Workload(64, (16, 128), 64), "smollm2": Workload(16, (16, 128), 32)}


def make_model(name: str, folder: Path) -> Path:
    """A 1 M parameter Qwen3, or random weights in the shape of SmolLM2-135M."""
    from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    if name == "tiny":
        config = Qwen3Config(
            vocab_size=1024, hidden_size=128, intermediate_size=384, num_hidden_layers=4, num_attention_heads=4,
            num_key_value_heads=2, head_dim=32, max_position_embeddings=512, tie_word_embeddings=True,
        )  # fmt: skip
        model = Qwen3ForCausalLM(config)
    else:
        config = LlamaConfig(
            vocab_size=49152, hidden_size=576, intermediate_size=1536, num_hidden_layers=30, num_attention_heads=9,
            num_key_value_heads=3, max_position_embeddings=2048, tie_word_embeddings=True, rope_theta=100000.0,
        )  # fmt: skip
        model = LlamaForCausalLM(config)
    # Generation never stops early: neither side has an end-of-sequence token.
    model.config.eos_token_id = model.generation_config.eos_token_id = None
    model.config.bos_token_id = model.generation_config.bos_token_id = None
    path = folder / name
    model.float().save_pretrained(path)
    return path


def make_prompts(work: Workload, vocab: int, seed: int) -> list[list[int]]:
    rng = random.Random(seed)
    low, high = work.prompt_tokens
    return [[rng.randrange(3, vocab) for _ in range(rng.randint(low, high))] for _ in range(work.requests)]


# ---- the reference ---------------------------------------------------------------------------------------------------


def reference_round(model: Any, prompts: list[list[int]], work: Workload) -> float:
    """Seconds of one padded, batched generate."""
    width = max(map(len, prompts))
    ids = torch.zeros(len(prompts), width, dtype=torch.long)
    mask = torch.zeros_like(ids)
    for row, prompt in enumerate(prompts):
        ids[row, width - len(prompt) :] = torch.tensor(prompt)
        mask[row, width - len(prompt) :] = 1
    started = time.perf_counter()
    with torch.inference_mode():
        out = model.generate(
            ids, attention_mask=mask, do_sample=True, temperature=1.0, top_k=0, top_p=1.0, pad_token_id=0,
            max_new_tokens=work.new_tokens, min_new_tokens=work.new_tokens,
        )  # fmt: skip
    seconds = time.perf_counter() - started
    assert out.shape[1] == width + work.new_tokens
    return seconds


def logprob_difference(model: Any, prompts: list[list[int]], answers: list[dict[str, Any]]) -> float:
    """Largest distance between the engine's log-probs and those of one full forward pass over each sequence."""
    worst = 0.0
    for prompt, answer in zip(prompts, answers, strict=True):
        out = answer["output_ids"]
        with torch.inference_mode():
            logits = model(torch.tensor([prompt + out])).logits[0, len(prompt) - 1 : -1]
        want = torch.log_softmax(logits.float(), -1).gather(1, torch.tensor(out)[:, None])[:, 0]
        got = torch.tensor([entry[0] for entry in answer["meta_info"]["output_token_logprobs"]])
        worst = max(worst, (want - got).abs().max().item())
    return worst


# ---- the engine ------------------------------------------------------------------------------------------------------


async def engine_round(
    clients: list[EngineClient], prompts: list[list[int]], work: Workload, seed: int
) -> tuple[float, list[dict[str, Any]]]:
    """Seconds from the first request sent to the last answer parsed; every prompt is its own HTTP request."""

    def payload(i: int) -> dict[str, Any]:
        params = {"max_new_tokens": work.new_tokens, "temperature": 1.0, "sampling_seed": seed + i}
        return {"input_ids": prompts[i], "sampling_params": params, "return_logprob": True}

    started = time.perf_counter()
    answers = await asyncio.gather(*(clients[i % len(clients)].generate(payload(i)) for i in range(len(prompts))))
    return time.perf_counter() - started, answers


async def take_turns(
    engines: list[EngineProcess], model: Any, name: str, rounds: int
) -> tuple[list[float], list[float], float]:
    """Seconds of each round of the engines and of the reference, and the largest difference of log-probs."""
    work, ours, theirs, difference = WORKLOADS[name], [], [], 0.0
    async with contextlib.AsyncExitStack() as stack:
        clients = [await stack.enter_async_context(EngineClient(e.url, admin_key=ADMIN_KEY)) for e in engines]
        for client, engine in zip(clients, engines, strict=True):
            await wait_ready(client, engine, 120.0)
        for i in range(rounds + 1):
            prompts = make_prompts(work, model.config.vocab_size, seed=i)
            theirs.append(reference_round(model, prompts, work))
            await asyncio.gather(*(client.flush() for client in clients))
            seconds, answers = await engine_round(clients, prompts, work, seed=1000 * i)
            ours.append(seconds)
            if i == 0:
                difference = logprob_difference(model, prompts, answers)
            print(f"{name} round {i}: generate {theirs[-1]:.3f} s, engine {ours[-1]:.3f} s", flush=True)
    return ours, theirs, difference


def compare(name: str, rounds: int, count: int, threads: int) -> dict[str, Any]:
    from transformers import AutoModelForCausalLM

    work = WORKLOADS[name]
    torch.set_num_threads(2)
    with tempfile.TemporaryDirectory() as folder:
        path = make_model(name, Path(folder))
        model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
        args = SimpleNamespace(embedded_num_threads=threads, embedded_max_running_requests=64, train_device="cpu")
        engines: list[EngineProcess] = []
        try:
            for index in range(count):
                engine = launch(
                    args, index=index, host="127.0.0.1", port=0, admin_key=ADMIN_KEY, model_path=str(path),
                    log_path=Path(folder) / f"engine_{index}.log", weight_version=0,
                )  # fmt: skip
                engines.append(engine)
            with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:  # the loop that Ray's actors have
                ours, theirs, difference = runner.run(take_turns(engines, model, name, rounds))
        finally:
            for engine in engines:
                terminate(engine.process)
    tokens = work.requests * work.new_tokens
    speed, reference = (tokens / statistics.median(seconds[1:]) for seconds in (ours, theirs))  # round 0 warms both up
    return {
        "tokens_per_s": round(speed, 1),
        "reference_tokens_per_s": round(reference, 1),
        "ratio": round(speed / reference, 3),
        "max_logprob_diff": difference,
        "engines": count,
        "threads_per_engine": threads,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=("tiny", "smollm2", "both"), default="both")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--engines", type=int, default=2, help="servers that share the requests")
    parser.add_argument("--num-threads", type=int, default=1, help="threads of each server; generate always gets 2")
    options = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "2"
    names = ["tiny", "smollm2"] if options.model == "both" else [options.model]
    results = {name: compare(name, options.rounds, options.engines, options.num_threads) for name in names}
    print(json.dumps({"benchmark": "embedded_engine"} | results))


if __name__ == "__main__":
    main()
