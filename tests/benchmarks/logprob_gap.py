"""SGLang's log-probs of what it sampled against other scores of the same tokens: how far apart, and why.

    python -m tests.benchmarks.logprob_gap --model DIR [--prompts DATA.jsonl] [--engine-flag sglang_attention_backend=triton ...]

One server samples at temperature 1 (decode), and then scores the same tokens as a prompt (prefill). The same is done with
deterministic inference and with a server in fp16, whose rounding is eight times finer. Beside them: transformers in fp32 and in bf16, variants of it in which one
thing at a time is rounded to bf16 or computed in another way, and this package's FSDP scorer. All distances are |difference| of
natural log-probs over the sampled tokens: mean, 99th percentile, maximum. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import random
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from tests.benchmarks._servers import Server, flags_of, server

Rows = list[list[int]]
Scores = torch.Tensor  # [sequences, new tokens], float64


def sample(running: Server, prompts: Rows, new_tokens: int, together: bool = True) -> tuple[Rows, Scores]:
    """Continuations and their log-probs as the server reports them with its answer."""

    async def work(client: Any) -> list[dict]:
        params = {"max_new_tokens": new_tokens, "temperature": 1.0, "ignore_eos": True}

        def one(i: int) -> Any:
            body = {"input_ids": prompts[i], "sampling_params": params | {"sampling_seed": i}, "return_logprob": True}
            return client.generate(body)

        if together:
            return list(await asyncio.gather(*map(one, range(len(prompts)))))
        return [await one(i) for i in range(len(prompts))]

    pairs = [answer["meta_info"]["output_token_logprobs"] for answer in running.call(work)]
    return [[p[1] for p in row] for row in pairs], torch.tensor([[p[0] for p in row] for row in pairs]).double()


def prefill(running: Server, prompts: Rows, outputs: Rows) -> Scores:
    """The same tokens scored as parts of a prompt, each sequence computed anew."""

    async def work(client: Any) -> list[list[float]]:
        scored = []
        for prompt, output in zip(prompts, outputs, strict=True):
            await client.flush()
            body = {"input_ids": prompt + output, "return_logprob": True, "logprob_start_len": 0}
            answer = await client.generate(body | {"sampling_params": {"max_new_tokens": 1, "temperature": 1.0}})
            scored.append([pair[0] for pair in answer["meta_info"]["input_token_logprobs"]][len(prompt) :])
        return scored

    return torch.tensor(running.call(work)).double()


# ---- transformers, and variants of it --------------------------------------------------------------------------------


@torch.no_grad()
def forward(
    model: Any, prompts: Rows, outputs: Rows, log_softmax: Callable = lambda x: torch.log_softmax(x.float(), -1)
) -> Scores:
    scores = []
    for prompt, output in zip(prompts, outputs, strict=True):
        ids = torch.tensor([prompt + output], device=model.device)
        logits = model(ids).logits[0, len(prompt) - 1 : -1]
        target = torch.tensor(output, device=model.device)[:, None]
        scores.append(log_softmax(logits).gather(1, target)[:, 0].double().cpu())
    return torch.stack(scores)


@torch.no_grad()
def decode(model: Any, prompts: Rows, outputs: Rows) -> Scores:
    """Token by token with a cache, as an engine does it, all sequences in one batch (prompts of one length)."""
    ids = torch.tensor(prompts, device=model.device)
    target = torch.tensor(outputs, device=model.device)
    scores, cache = [], None
    for i in range(target.shape[1]):
        out = model(ids, past_key_values=cache, use_cache=True)
        cache = out.past_key_values
        scores.append(torch.log_softmax(out.logits[:, -1].float(), -1).gather(1, target[:, i : i + 1]))
        ids = target[:, i : i + 1]
    return torch.cat(scores, 1).double().cpu()


def load(model: Path, dtype: torch.dtype, attention: str = "sdpa") -> Any:
    from transformers import AutoModelForCausalLM

    device = "cuda" if torch.cuda.is_available() else "cpu"
    loaded = AutoModelForCausalLM.from_pretrained(model, dtype=dtype, attn_implementation=attention)
    return loaded.to(device).eval()


ROUNDED = {
    "linear layers": lambda name, m: isinstance(m, torch.nn.Linear) and "lm_head" not in name,
    "attention block": lambda name, m: name.endswith("self_attn"),
    "norms": lambda name, m: "norm" in name,
    "residual stream": lambda name, m: name.count(".") == 2 and ".layers." in name,
    "logits": lambda name, m: name == "lm_head",
    "everything": lambda name, m: not list(m.children()) or ".layers." in name,
}


@contextlib.contextmanager
def rounding(model: Any, chosen: Callable[[str, Any], bool]) -> Iterator[None]:
    """Outputs of the chosen modules pass through bf16; the rest stays in fp32."""

    def hook(module: Any, args: Any, output: Any) -> Any:
        if isinstance(output, tuple):
            return (output[0].bfloat16().float(), *output[1:])
        return output.bfloat16().float() if torch.is_tensor(output) else output

    handles = [m.register_forward_hook(hook) for name, m in model.named_modules() if chosen(name, m)]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def transformers_scores(model: Path, prompts: Rows, outputs: Rows) -> dict[str, Scores]:
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cudnn.allow_tf32 = False
    exact = load(model, torch.float32)
    scores = {"transformers fp32": forward(exact, prompts, outputs)}
    scores["transformers fp32, decoded with a cache"] = decode(exact, prompts, outputs)
    for name, chosen in ROUNDED.items():
        with rounding(exact, chosen):
            scores[f"fp32, {name} rounded to bf16"] = forward(exact, prompts, outputs)
    del exact
    scores["transformers fp16"] = forward(load(model, torch.float16), prompts, outputs)
    low = load(model, torch.bfloat16)
    scores["transformers bf16"] = forward(low, prompts, outputs)
    scores["transformers bf16, decoded with a cache"] = decode(low, prompts, outputs)
    scores["transformers bf16, log-softmax in bf16"] = forward(
        low, prompts, outputs, lambda x: torch.log_softmax(x, -1)
    )
    scores["transformers bf16, log(softmax) in fp32"] = forward(
        low, prompts, outputs, lambda x: torch.softmax(x.float(), -1).log()
    )
    head = low.lm_head
    head.forward = lambda hidden: torch.nn.functional.linear(hidden.float(), head.weight.float())
    scores["transformers bf16, logits in fp32"] = forward(low, prompts, outputs)
    del low
    scores["transformers bf16, attention written out"] = forward(load(model, torch.bfloat16, "eager"), prompts, outputs)
    return scores


def trainer_scores(model: str, prompts: Rows, outputs: Rows) -> torch.Tensor:
    """By this package's trainer, packed. Runs in a process with a process group."""
    from tests.fast.fsdp_utils import jobs

    count = len(prompts)
    args = jobs.make_args(model, train_device="cuda", bf16=True, max_tokens_per_gpu=8192, global_batch_size=count)
    backend, _ = jobs.make_backend(args)
    data = {
        "tokens": [p + o for p, o in zip(prompts, outputs, strict=True)],
        "response_lengths": [len(o) for o in outputs],
        "total_lengths": [len(p) + len(o) for p, o in zip(prompts, outputs, strict=True)],
        "rollout_ids": list(range(count)),
        "rollout_mask_sums": [len(o) for o in outputs],
        "loss_masks": [[1] * len(o) for o in outputs],
        "rewards": [0.0] * count,
        "raw_reward": [0.0] * count,
        "truncated": [0] * count,
        "sample_indices": list(range(count)),
        "rollout_log_probs": [[0.0] * len(o) for o in outputs],
    }
    shard = jobs.shard_of(backend, data)
    by_sample = dict(zip(shard.columns["sample_indices"], backend.score(shard, "actor"), strict=True))
    return torch.stack([by_sample[i] for i in range(count)]).double()


# ---- the table -------------------------------------------------------------------------------------------------------


def distance(a: Scores, b: Scores) -> dict[str, float]:
    d = (a - b).abs().flatten()
    return {"mean": float(d.mean()), "p99": float(d.quantile(0.99)), "max": float(d.max())}


def make_prompts(options: argparse.Namespace) -> Rows:
    """`--count` prompts of `--prompt-tokens` tokens each."""
    from transformers import AutoTokenizer

    if options.prompts is None:
        rng = random.Random(0)
        return [[rng.randrange(100, 30000) for _ in range(options.prompt_tokens)] for _ in range(options.count)]
    tokenizer = AutoTokenizer.from_pretrained(options.model)
    rows = [json.loads(line) for line in options.prompts.read_text().splitlines()]
    encoded = [tokenizer.apply_chat_template(r["input"], add_generation_prompt=True, return_dict=False) for r in rows]
    length = len(encoded[0])
    return [row for row in encoded if len(row) == length][: options.count]


def measure(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    prompts, flags = make_prompts(options), flags_of(options.engine_flag)
    kinds: dict[str, dict[str, Any]] = {
        "SGLang": {},
        "SGLang deterministic": {"sglang_enable_deterministic_inference": True},
    }
    kinds["SGLang fp16"] = {"sglang_dtype": "float16"}
    report: dict[str, Any] = {}
    for name, more in kinds.items():
        if options.only is not None and name != options.only:
            continue
        try:
            with server("sglang", options.model, folder, name.replace(" ", "_"), **flags | more) as running:
                running.wait()
                outputs, decoded = sample(running, prompts, options.new_tokens)
                scores = {f"{name}, decode": decoded, f"{name}, prefill": prefill(running, prompts, outputs)}
                again, alone = sample(running, prompts[:4], options.new_tokens, together=False)
        except Exception as error:
            report[name] = {"failed": str(error)[-1500:]}
            continue
        same = [i for i in range(4) if again[i] == outputs[i]]
        alone_equal = bool(same) and all(torch.equal(alone[i], decoded[i]) for i in same)
        others = transformers_scores(options.model, prompts, outputs) | score_by_trainer(options, prompts, outputs)
        exact = others["transformers fp32"]
        report[name] = {
            "sampled_alone_as_in_a_batch": f"{len(same)} of 4 token for token"
            + (", bit for bit" if alone_equal else ""),
            "mean_logprob": float(decoded.mean()),
            "to fp32": {key: distance(value, exact) for key, value in (scores | others).items()},
            "to the engine's decode": {key: distance(value, decoded) for key, value in (scores | others).items()},
        }
        show(name, report[name])
    return report


def score_by_trainer(options: argparse.Namespace, prompts: Rows, outputs: Rows) -> dict[str, Scores]:
    if not torch.cuda.is_available():
        return {}
    from tests.helpers.gloo_world import World

    with World(1, backend="cpu:gloo,cuda:nccl") as world:
        return {"FSDP trainer bf16, packed": world.run(trainer_scores, str(options.model), prompts, outputs)[0]}


def show(name: str, result: dict[str, Any]) -> None:
    print(
        f"\n{name}: mean log-prob {result['mean_logprob']:.3f}; alone as in a batch: {result['sampled_alone_as_in_a_batch']}"
    )
    for reference in ("to fp32", "to the engine's decode"):
        print(f"  |difference| {reference}: mean, p99, max")
        for key, d in result[reference].items():
            print(f"    {key:48s} {d['mean']:.2e} {d['p99']:.2e} {d['max']:.2e}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--prompts", type=Path, help="rows with `input` messages; random token ids when left out")
    parser.add_argument("--engine-flag", action="append", default=[], metavar="NAME=VALUE")
    parser.add_argument("--only", help="of SGLang, SGLang deterministic, SGLang fp16")
    parser.add_argument("--count", type=int, default=32)
    parser.add_argument("--prompt-tokens", type=int, default=64)
    parser.add_argument("--new-tokens", type=int, default=64)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        print(json.dumps({"benchmark": "logprob_gap"} | measure(options, Path(folder))))


if __name__ == "__main__":
    main()
