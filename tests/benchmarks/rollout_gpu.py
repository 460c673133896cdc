"""Tokens per second of SGLang under our rollout, against a bare load generator on the same server.

    python -m tests.benchmarks.rollout_gpu --model DIR --prompts DATA.jsonl [--new-tokens 256] [--engine-flag NAME=VALUE ...]

Both send the same prompts, each its own HTTP request, at the same concurrency, and get log-probs back. The generator posts
prepared bodies and parses the answers' JSON; ours runs the whole rollout function: data source, tokenizer, samples, rewards,
contracts. They take turns on one server whose prefix cache is dropped before each round; medians over rounds after the
first. The limit is 97 % of the generator. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

import aiohttp
import orjson
import uvloop

from miles.arguments import make_args
from miles.backends.engine_api.client import EngineClient
from miles.rollout.base_types import RolloutFnConstructorInput, RolloutFnTrainInput
from miles.rollout.generate_state import rollout_sampling_params
from miles.rollout.inference_rollout.inference_rollout_common import InferenceRolloutFn
from miles.router.engine_pool import EnginePool
from miles.utils.imports import load_function
from tests.benchmarks._servers import Server, flags_of, server

LIMIT = 0.97


class Recorder(EnginePool):
    """The pool as it is; it notes the payloads that it is asked for."""

    def __init__(self, args: Any) -> None:
        super().__init__(args)
        self.payloads: list[dict[str, Any]] = []

    async def generate(self, payload: dict[str, Any], **options: Any) -> Any:
        self.payloads.append(payload)
        return await super().generate(payload, **options)


async def our_round(rollout: InferenceRolloutFn, rollout_id: int) -> tuple[float, int]:
    started = time.perf_counter()
    output = await rollout(RolloutFnTrainInput(rollout_id=rollout_id, weight_version=0))
    seconds = time.perf_counter() - started
    return seconds, sum(sample.response_length for group in output.samples for sample in group)


async def bare_round(url: str, bodies: list[bytes]) -> tuple[float, int]:
    headers = {"Content-Type": "application/json"}
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:

        async def one(body: bytes) -> int:
            async with session.post(f"{url}/generate", data=body, headers=headers) as reply:
                answer = orjson.loads(await reply.read())
            return len(answer["meta_info"]["output_token_logprobs"])

        started = time.perf_counter()
        counts = await asyncio.gather(*map(one, bodies))
        return time.perf_counter() - started, sum(counts)


async def take_turns(args: Any, running: Server, rounds: int) -> dict[str, Any]:
    pool = Recorder(args)
    ours, bare = [], []
    async with EngineClient(running.process.url, admin_key="benchmark", request_timeout_s=600) as client:
        pool.set_engine(0, client)
        rollout = InferenceRolloutFn(
            RolloutFnConstructorInput(args=args, data_source=load_function(args.data_source_path)(args), engines=pool)
        )
        for i in range(rounds + 1):
            pool.payloads.clear()
            await client.flush()
            ours.append(await our_round(rollout, i))
            bodies = [orjson.dumps(payload) for payload in pool.payloads]
            await client.flush()
            bare.append(await bare_round(running.process.url, bodies))
            rates = [f"{tokens / seconds:.0f}" for seconds, tokens in (ours[-1], bare[-1])]
            print(f"round {i}: {len(bodies)} requests, ours {rates[0]} tokens/s, bare {rates[1]}", flush=True)
    rate = [median(tokens / seconds for seconds, tokens in side[1:]) for side in (ours, bare)]
    return {
        "requests": len(bodies),
        "tokens_a_round": ours[-1][1],
        "tokens_per_s": round(rate[0]),
        "bare_tokens_per_s": round(rate[1]),
        "ratio": round(rate[0] / rate[1], 4),
        "rounds": rounds,
        "limit": LIMIT,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--prompts", type=Path, required=True)
    parser.add_argument("--engine", default="sglang")
    parser.add_argument("--engine-flag", action="append", default=[], metavar="NAME=VALUE")
    parser.add_argument("--new-tokens", type=int, default=256)
    parser.add_argument("--groups", type=int, default=32)
    parser.add_argument("--samples", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    flags = flags_of(options.engine_flag)
    args = make_args(
        check=False, hf_checkpoint=options.model, prompt_data=str(options.prompts), input_key="input", label_key="label",
        apply_chat_template=True, rollout_engine=options.engine, rollout_num_gpus=1, actor_num_gpus_per_node=1,
        rollout_batch_size=options.groups, n_samples_per_prompt=options.samples, rollout_max_response_len=options.new_tokens,
        custom_rm_path="tests.benchmarks._gpu_task.even_share", num_rollout=options.rounds + 1, rollout_temperature=1.0,
        rollout_skip_special_tokens=True,
    )  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        engine = server(options.engine, Path(options.model), Path(folder), train_device=args.train_device, **flags)
        with engine as running, asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            running.wait()
            result = runner.run(take_turns(args, running, options.rounds))
    params = rollout_sampling_params(args)
    print(json.dumps({"benchmark": "rollout_gpu", "new_tokens": params["max_new_tokens"]} | result))


if __name__ == "__main__":
    main()
