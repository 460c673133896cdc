"""Colocated GRPO on one GPU: SGLang and the FSDP trainer take turns on it. Does it learn, and where does a step's time go?

    python -m tests.benchmarks.colocated_gpu --tokenizer DIR [--shape qwen3-0.6b] [--engine-flags="..."] [--out DIR]

1. A warm start by SFT, then GRPO on letters to reverse: the reward has to rise.
2. Long responses (`--long-tokens`), a few steps: the breakdown. Times of the first step are left out.

Both runs start by the driver, verify every update by the engine's own checksums, and leave their folders below `--out`.
`--shape tiny --train-device cpu` tries the program out where there is no GPU. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import shlex
import tempfile
from pathlib import Path
from statistics import mean, median
from typing import Any

from tests.benchmarks._gpu_task import make_model, make_tasks
from tests.benchmarks._runs import gpu_memory, run_driver
from tests.benchmarks.driver_overhead import step_times
from tests.benchmarks.quickstart_run import read_rows

# What a step is made of, each measured where the work is done.
PARTS = {
    "generation": ("perf/rollout_busy_time",),
    "training": ("perf/train_busy_time",),
    "update": ("perf/update_weights_time",),
    "memory_turns": (
        "perf/release_engines_time",
        "perf/wake_trainer_time",
        "perf/sleep_trainer_time",
        "perf/resume_engines_time",
    ),
}


def warm_start(out: Path, model: Path, options: argparse.Namespace) -> Path:
    steps = options.sft_steps
    flags = ["--hf-checkpoint", model, "--save-hf", out / "warm/{rollout_id}", "--save-interval", steps]
    flags += ["--debug-train-only", "--rollout-function-path", "miles.rollout.sft_rollout.generate_rollout"]
    flags += ["--prompt-data", out / "data/sft.jsonl", "--input-key", "input", "--label-key", "label"]
    flags += ["--apply-chat-template", "--loss-type", "sft_loss", "--disable-compute-advantages-and-returns"]
    flags += ["--calculate-per-token-loss", "--num-rollout", steps, "--rollout-batch-size", 128]
    flags += ["--global-batch-size", 128, "--use-dynamic-batch-size", "--max-tokens-per-gpu", 16384]
    flags += ["--lr", options.sft_lr, "--lr-warmup-iters", min(20, steps // 4), *trainer_flags(options)]
    run_driver(out / "sft", flags)
    return out / f"warm/{steps - 1}"


def trainer_flags(options: argparse.Namespace) -> list[Any]:
    flags = ["--train-backend", "fsdp", "--actor-num-gpus-per-node", 1, "--adam-beta2", 0.95, "--weight-decay", 0]
    return flags + (["--train-device", options.train_device] if options.train_device else [])


def rl_flags(model: Path, out: Path, options: argparse.Namespace) -> list[Any]:
    flags = [
        "--hf-checkpoint",
        model,
        "--colocate",
        "--rollout-engine",
        options.engine,
        "--advantage-estimator",
        "grpo",
    ]
    flags += ["--prompt-data", out / "data/train.jsonl", "--input-key", "input", "--label-key", "label"]
    flags += ["--apply-chat-template", "--rollout-skip-special-tokens", "--rollout-temperature", 1]
    flags += ["--use-dynamic-batch-size", "--lr-decay-style", "constant"]
    flags += [*trainer_flags(options), *shlex.split(options.engine_flags)]
    return flags + ([] if options.train_device != "cpu" else ["--offload", "--update-weight-transfer-mode", "ipc"])


def learning_run(out: Path, model: Path, options: argparse.Namespace) -> dict[str, Any]:
    flags = ["--custom-rm-path", "tests.benchmarks._gpu_task.letters_in_place", "--rollout-max-response-len", 8]
    flags += ["--num-rollout", options.rl_steps, "--rollout-batch-size", 32, "--n-samples-per-prompt", 8]
    flags += ["--global-batch-size", 256, "--max-tokens-per-gpu", 16384, "--lr", options.rl_lr]
    launched = run_driver(out / "rl", [*rl_flags(model, out, options), *flags])
    rows = read_rows(out / "rl")
    rewards = [row["rollout/raw_reward"] for row in rows if "rollout/raw_reward" in row]
    return {
        "reward_first_3": round(mean(rewards[:3]), 3),
        "reward_last_3": round(mean(rewards[-3:]), 3),
        "rewards": [round(r, 3) for r in rewards],
        "train_rollout_logprob_abs_diff": series(rows, "train/train_rollout_logprob_abs_diff"),
        "updates_verified": sorted(set(series(rows, "contract/weight_digest_verified"))),
        "startup": startup(rows, launched),
        "breakdown": breakdown(rows),
    }


def long_run(out: Path, model: Path, options: argparse.Namespace) -> dict[str, Any]:
    length, prompts = options.long_tokens, 8 if options.shape == "tiny" else 32
    flags = ["--custom-rm-path", "tests.benchmarks._gpu_task.even_share", "--rollout-max-response-len", length]
    flags += ["--num-rollout", options.long_steps, "--rollout-batch-size", prompts, "--n-samples-per-prompt", 8]
    flags += ["--global-batch-size", prompts * 8, "--max-tokens-per-gpu", 32768, "--lr", 1e-6]
    with gpu_memory() as samples:
        launched = run_driver(out / "long", [*rl_flags(model, out, options), *flags])
    rows = read_rows(out / "long")
    result = breakdown(rows) | {"startup": startup(rows, launched)}
    result["response_tokens"] = series(rows, "rollout/response_length/mean")
    result["peak_gpu_memory_gib"] = round(max((used for _, used in samples), default=0.0), 1)
    result["peak_trainer_memory_gib"] = round(max(series(rows, "perf/trainer_peak_memory_gib"), default=0.0), 1)
    return result


def series(rows: list[dict], key: str) -> list[float]:
    return [round(row[key], 6) for row in rows if key in row]


def startup(rows: list[dict], launched: float) -> dict[str, float]:
    """Seconds of the stages before the first step, and from the launch to the end of the first optimizer step."""
    first_step = next(row["_time"] for row in rows if "train/loss" in row)
    stages = {k.removeprefix("perf/startup/"): v for row in rows for k, v in row.items() if "perf/startup/" in k}
    first = {
        k.removeprefix("perf/"): v
        for k, v in step_times(rows)[0].items()
        if k in ("perf/train_wait_time", "perf/train_time")
    }
    return {k: round(v, 2) for k, v in (stages | first | {"launch_to_first_step_s": first_step - launched}).items()}


def breakdown(rows: list[dict]) -> dict[str, Any]:
    """Medians over the steps after the first: seconds of each part, of the whole step, and of what is left (waiting)."""
    steps = [times for step, times in sorted(step_times(rows).items()) if step > 0 and "perf/step_time" in times]
    out: dict[str, Any] = {"steps": len(steps)}
    for name, keys in PARTS.items():
        out[f"{name}_s"] = round(median(sum(times.get(key, 0.0) for key in keys) for times in steps), 4)
    out["step_s"] = round(median(times["perf/step_time"] for times in steps), 4)
    parts = [sum(times.get(key, 0.0) for keys in PARTS.values() for key in keys) for times in steps]
    out["waiting_s"] = round(median(t["perf/step_time"] - p for t, p in zip(steps, parts, strict=True)), 4)
    out["update_share"] = round(out["update_s"] / out["step_s"], 4)
    updates = sorted({key for times in steps for key in times if key.startswith("perf/update_weights/")})
    out["update"] = {k.rpartition("/")[2]: round(median(t[k] for t in steps if k in t), 4) for k in updates}
    if out["update"].get("transfer_s"):
        out["update_gb_per_s"] = round(out["update"]["bytes"] / out["update"]["transfer_s"] / 1e9, 2)
    return out


def copy_bandwidth() -> float | None:
    """GB/s of a device-to-device copy of 1 GiB, counted once (not read and written); None without a GPU."""
    import torch

    if not torch.cuda.is_available():
        return None
    source = torch.empty(1 << 30, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    times = []
    for _ in range(12):
        begin.record()
        target.copy_(source)
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) / 1000)
    return round((1 << 30) / median(times[2:]) / 1e9, 1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--tokenizer", type=Path, required=True, help="a directory with a tokenizer and a chat template"
    )
    parser.add_argument("--shape", default="qwen3-0.6b")
    parser.add_argument("--engine", default="sglang")
    parser.add_argument("--engine-flags", default="", help="more flags of train.py, for the engine")
    parser.add_argument("--train-device")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--sft-steps", type=int, default=250)
    parser.add_argument("--sft-lr", type=float, default=3e-4)
    parser.add_argument("--rl-steps", type=int, default=20)
    parser.add_argument("--rl-lr", type=float, default=1e-5)
    parser.add_argument("--long-steps", type=int, default=6)
    parser.add_argument("--long-tokens", type=int, default=512)
    parser.add_argument("--only", choices=("learning", "long"))
    options = parser.parse_args()
    out = options.out or Path(tempfile.mkdtemp(prefix="miles-colocated-"))
    make_tasks(out / "data", rows=4096)
    dtype = "float32" if options.train_device == "cpu" else "bfloat16"
    model = make_model(out / "model", options.tokenizer, options.shape, dtype=dtype)
    result: dict[str, Any] = {"benchmark": "colocated_gpu", "shape": options.shape}
    if options.only != "long":
        result["learning"] = learning_run(out, warm_start(out, model, options), options)
        print(json.dumps(result["learning"], indent=2), flush=True)
    if options.only != "learning":
        result["long"] = long_run(out, model, options)
        result["copy_gb_per_s"] = copy_bandwidth()
    print(json.dumps(result))


if __name__ == "__main__":
    main()
