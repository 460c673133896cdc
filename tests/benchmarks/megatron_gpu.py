"""A training step of the Megatron trainer on one GPU: beside FSDP, and beside a plain megatron-core loop, on the same work.

    python -m tests.benchmarks.megatron_gpu [--models 0.6b 4b] [--steps 5]

Qwen3-0.6B and Qwen3-4B shapes with random weights, bf16 with fp32 master weights, rows of 8192 tokens that pack 8 sequences
of 1024 (128 of prompt), 4 rows a step. `megatron` and `fsdp` are our backends' whole `train` call: advantages, GRPO loss,
metrics, gradient norm and step. `plain` is `get_forward_backward_func` over the same modules with megatron-core's own
cross-entropy at every token and its own `optimizer.step()`, none of our loop. Each case is a process of its own; the figure
is the median of the steps after two to warm up.

The share of the matrix rate counts the FLOPs of the model's matrices (head on response rows only, for all three) against what
a large bf16 product reaches on this card. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

SHAPES: dict[str, dict[str, Any]] = {
    "0.6b": {"hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28, "num_attention_heads": 16},
    "4b": {"hidden_size": 2560, "intermediate_size": 9728, "num_hidden_layers": 36, "num_attention_heads": 32},
    "tiny": {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4},
}
CASES = ("megatron", "plain", "fsdp")
WARM_UP, LIMIT = 2, 0.03


def work_of(name: str) -> SimpleNamespace:
    """Sequences of `length`, `rows` packed rows of `per_row` of them."""
    if name == "tiny":
        return SimpleNamespace(length=32, prompt=8, per_row=4, rows=2, vocab=1024, head_dim=16)
    return SimpleNamespace(length=1024, prompt=128, per_row=8, rows=4, vocab=151936, head_dim=128)


def write_model(name: str, directory: Path, device: str) -> Path:
    import torch
    import transformers

    from tests.helpers.tiny_models import make_tokenizer

    work = work_of(name)
    config = transformers.Qwen3Config(
        vocab_size=work.vocab, num_key_value_heads=2 if name == "tiny" else 8, head_dim=work.head_dim,
        tie_word_embeddings=True, max_position_embeddings=40960, rope_theta=1e6, rms_norm_eps=1e-6, **SHAPES[name],
    )  # fmt: skip
    torch.manual_seed(0)
    with torch.device(device):
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(directory)
    make_tokenizer().save_pretrained(directory)
    return directory


def make_args(model: str, work: SimpleNamespace, device: str) -> SimpleNamespace:
    samples = work.rows * work.per_row
    return SimpleNamespace(
        hf_checkpoint=model, train_device=device, bf16=device == "cuda", lr=1e-6, weight_decay=0.01, adam_beta2=0.95,
        num_rollout=100, rollout_batch_size=samples // 8 or 1, n_samples_per_prompt=8, global_batch_size=samples,
        loss_type="policy_loss", advantage_estimator="grpo", eps_clip=0.2, kl_loss_type="k3", rollout_temperature=1.0,
        use_dynamic_batch_size=True, max_tokens_per_gpu=work.length * work.per_row, micro_batch_size=work.per_row,
        clip_grad=1.0, seed=1, qkv_format="thd", accumulate_allreduce_grads_in_fp32=True,
    )  # fmt: skip


def make_batch(work: SimpleNamespace, seed: int) -> dict[str, Any]:
    import torch

    g = torch.Generator().manual_seed(seed)
    count, response = work.rows * work.per_row, work.length - work.prompt
    return {
        "tokens": [torch.randint(3, 1000, (work.length,), generator=g).tolist() for _ in range(count)],
        "response_lengths": [response] * count,
        "total_lengths": [work.length] * count,
        "loss_masks": [[1] * response] * count,
        "rewards": [1.0, -1.0] * (count // 2),
        "raw_reward": [1.0, 0.0] * (count // 2),
        "truncated": [0] * count,
        "sample_indices": list(range(count)),
        "rollout_ids": list(range(count)),
        "rollout_mask_sums": [response] * count,
        "rollout_log_probs": [[-11.0] * response] * count,
    }


def our_step(backend: Any, work: SimpleNamespace) -> Callable[[int], None]:
    from miles.backends.training_utils.batching.planner import plan_batches
    from miles.backends.training_utils.batching.shards import split_train_data

    backend.load()

    def step(i: int) -> None:
        data = make_batch(work, 0)
        shard = split_train_data(data, plan_batches(data, backend.parallel, backend.args), i)[0]
        started[0] = time.perf_counter()
        backend.train(shard)

    started = [0.0]
    step.started = started  # type: ignore[attr-defined]
    return step


def plain_step(args: SimpleNamespace, work: SimpleNamespace) -> Callable[[int], None]:
    """A loop as megatron-core's examples have it, over the modules that our backend builds."""
    import torch
    from megatron.core.packed_seq_params import PackedSeqParams
    from megatron.core.pipeline_parallel import get_forward_backward_func

    from miles.backends.megatron_utils.backend import MegatronBackend

    backend = MegatronBackend(args)
    backend.load()
    chunk, optimizer, device = backend.chunks[0], backend.optimizer, backend.device
    data = make_batch(work, 0)
    ids = torch.tensor(data["tokens"]).view(work.rows, 1, -1).to(device)
    labels = ids.roll(-1, dims=-1)
    positions = torch.arange(work.length, device=device).repeat(work.per_row)[None]
    mask = (positions >= work.prompt).float()
    borders = torch.arange(0, work.length * work.per_row + 1, work.length, dtype=torch.int32, device=device)
    row = PackedSeqParams("thd", borders, borders, max_seqlen_q=work.length, max_seqlen_kv=work.length)

    def forward(batches: Any, model: Any) -> Any:
        tokens, targets = next(batches)
        losses = model(tokens, positions, None, labels=targets, packed_seq_params=row)

        def loss(output: torch.Tensor) -> Any:
            value = (output.float() * mask).sum() / mask.sum() / work.rows
            return value, torch.zeros((), dtype=torch.int, device=device), {"loss": value.detach()}

        return losses, loss

    def step(i: int) -> None:
        started[0] = time.perf_counter()
        chunk.zero_grad_buffer()
        optimizer.zero_grad()
        found = get_forward_backward_func()(
            forward_step_func=forward, data_iterator=iter(zip(ids, labels, strict=True)), model=chunk,
            num_microbatches=work.rows, seq_length=ids.shape[-1], micro_batch_size=1, forward_only=False,
        )  # fmt: skip
        optimizer.step()
        float(sum(one["loss"] for one in found))

    started = [0.0]
    step.started = started  # type: ignore[attr-defined]
    return step


def matrix_tflops() -> float:
    """What a large bf16 product reaches on this card."""
    import torch

    if not torch.cuda.is_available():
        return 0.0
    a, b = (torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    times = []
    for _ in range(30):
        torch.cuda.synchronize()
        started = time.perf_counter()
        for _ in range(5):
            a @ b
        torch.cuda.synchronize()
        times.append((time.perf_counter() - started) / 5)
    return 2 * 8192**3 / statistics.median(times[5:]) / 1e12


def run_case(case: str, name: str, model: str, steps: int) -> dict[str, float]:
    import torch
    import torch.distributed as dist

    from miles.backends.training_utils.batching.flops import ModelDims
    from miles.backends.training_utils.throughput import batch_flops

    cuda = torch.cuda.is_available()
    device, work = "cuda" if cuda else "cpu", work_of(name)
    rate = matrix_tflops()
    with tempfile.NamedTemporaryFile() as file:
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if cuda else "gloo", store=dist.FileStore(file.name, 1), rank=0, world_size=1
        )
        args = make_args(model, work, device)
        if case == "plain":
            step = plain_step(args, work)
        elif case == "megatron":
            from miles.backends.megatron_utils.backend import MegatronBackend

            step = our_step(MegatronBackend(args), work)
        else:
            from miles.backends.fsdp_utils.backend import FSDPBackend

            args.attn_implementation = "sdpa"
            step = our_step(FSDPBackend(args), work)
        times = []
        for i in range(WARM_UP + steps):
            if i == WARM_UP and cuda:
                torch.cuda.reset_peak_memory_stats()
            step(i)
            if cuda:
                torch.cuda.synchronize()
            times.append(time.perf_counter() - step.started[0])  # type: ignore[attr-defined]
        dist.destroy_process_group()
    count = work.rows * work.per_row
    dims = ModelDims.from_hf_directory(model)
    flops = 3 * batch_flops(dims, [work.length] * count, [work.length - work.prompt] * count)
    seconds = statistics.median(times[WARM_UP:])
    return {
        "seconds": seconds,
        "fastest": min(times[WARM_UP:]),
        "tokens_per_s": count * work.length / seconds,
        "tflops": flops / seconds / 1e12,
        "matrix_tflops": rate,
        "share_of_matrix_rate": flops / seconds / 1e12 / rate if rate else 0.0,
        "peak_memory_gib": torch.cuda.max_memory_allocated() / 2**30 if cuda else 0.0,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=SHAPES, default=["0.6b", "4b"])
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--case", help=argparse.SUPPRESS)
    parser.add_argument("--directory", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.case:
        print(json.dumps(run_case(options.case, options.models[0], options.directory, options.steps)))
        return
    results: dict[str, Any] = {}
    for name in options.models:
        with tempfile.TemporaryDirectory() as folder:
            write_in_child(name, folder)
            for case in options.cases:
                results[f"{name}/{case}"] = child(case, name, folder, options.steps)
                print(f"{name}/{case}", json.dumps(results[f"{name}/{case}"]), flush=True)
    overheads = {
        name: results[f"{name}/megatron"]["seconds"] / results[f"{name}/plain"]["seconds"] - 1
        for name in options.models
        if {"megatron", "plain"} <= set(options.cases)
    }
    ok = all(overhead < LIMIT for overhead in overheads.values())
    print(json.dumps({"benchmark": "megatron_gpu", "ok": ok, "limit": LIMIT, "overhead": overheads, "cases": results}))


def write_in_child(name: str, folder: str) -> None:
    code = (
        "import sys, torch; from pathlib import Path; from tests.benchmarks.megatron_gpu import write_model; "
        "write_model(sys.argv[1], Path(sys.argv[2]), 'cuda' if torch.cuda.is_available() else 'cpu')"
    )
    subprocess.run([sys.executable, "-c", code, name, folder], check=True, timeout=300)


def child(case: str, name: str, folder: str, steps: int) -> dict[str, Any]:
    command = [sys.executable, "-m", "tests.benchmarks.megatron_gpu", "--case", case, "--models", name]
    command += ["--directory", folder, "--steps", str(steps)]
    env = os.environ | {"CUDA_DEVICE_MAX_CONNECTIONS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=500, env=env)
    if done.returncode:
        raise RuntimeError(f"{name}/{case} failed:\n{done.stderr[-4000:]}")
    return json.loads(done.stdout.strip().splitlines()[-1])


if __name__ == "__main__":
    main()
