"""A whole GRPO step, ours against TRL's `GRPOTrainer`, on the same work, cores and precision.

    python -m tests.benchmarks.trl_step [--cases tiny smollm2] [--trl-venv build/trl-venv] [--steps 8]

Ours is what a user runs: `train.py` with Ray actors, an engine behind HTTP, FSDP2, and a verified weight update after every
step; a step is all the time from one `generate` to the next. TRL runs in an environment of its own (made if it is not
there), in one process: `generate` of transformers, fp32, no gradient checkpointing, no reference model. Neither side stops
at end-of-sequence. Both are medians after a warm-up; runs alternate, so that a busy machine is busy for both.
The last line is one JSON object; `ratio` is TRL's seconds over ours, so more than 1 means that ours is faster.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path

REPO = Path(__file__).resolve().parents[2]
TRL_PACKAGES = ("torch==2.13.0", "trl>=1.0")
RUN_TIMEOUT_S = 1800


@dataclass(frozen=True)
class Case:
    """One amount of work: every one of `prompts` x `samples` responses has `tokens` tokens."""

    name: str
    model: str
    prompts: int
    samples: int
    tokens: int
    maker: str  # the script that makes the model
    layout: tuple[str, ...]  # our flags: how the cores are used


CASES = {
    "tiny": Case(
        "1M Qwen3",
        "build/quickstart/model",
        prompts=8,
        samples=8,
        tokens=64,
        maker="scripts/make_quickstart.py",
        layout=("--actor-num-gpus-per-node", "2", "--rollout-num-gpus", "2"),  # a rank and an engine for each core
    ),
    "smollm2": Case(
        "SmolLM2-135M",
        "build/smollm2-135m",
        prompts=4,
        samples=4,
        tokens=32,
        maker="scripts/make_smollm2.py",
        # One rank of two threads: no copy of the weights travels between ranks, and prompts are shared by whole groups.
        layout=("--actor-num-gpus-per-node", "1", "--actor-cpus-per-rank", "2", "--rollout-num-gpus", "2"),
    ),
}
ROWS = "build/quickstart/train.jsonl"


def run(command: list[str], env: dict[str, str] | None = None) -> str:
    """Output of a command that must succeed. Raises: SystemExit with the end of its output."""
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"} | (env or {})
    done = subprocess.run(
        command, cwd=REPO, env=environment, capture_output=True, text=True, timeout=RUN_TIMEOUT_S, check=False
    )
    if done.returncode != 0:
        end = (done.stdout + done.stderr)[-6000:]
        raise SystemExit(f"{' '.join(command)}\nended with exit code {done.returncode}:\n{end}")
    return done.stdout


def make_assets(case: Case) -> None:
    """Tasks and model, if they are not there yet."""
    for target, maker in ((ROWS, "scripts/make_quickstart.py"), (case.model, case.maker)):
        if not (REPO / target).exists():
            run([sys.executable, maker])


def trl_python(venv: Path) -> Path:
    """The interpreter of an environment that has TRL."""
    python = venv / "bin" / "python"
    if not python.exists():
        print(f"making {venv} with {', '.join(TRL_PACKAGES)}", flush=True)
        run([sys.executable, "-m", "venv", str(venv)])
        run([str(python), "-m", "pip", "install", "-q", *TRL_PACKAGES])
    return python


def trl_steps(case: Case, python: Path, steps: int, warmup: int, threads: int) -> list[float]:
    """Seconds of each of TRL's steps."""
    job = {"model": str(REPO / case.model), "rows": str(REPO / ROWS), "threads": threads}
    job |= {"prompts": case.prompts, "samples": case.samples, "tokens": case.tokens, "steps": steps, "warmup": warmup}
    script = REPO / "tests" / "benchmarks" / "_trl_worker.py"
    output = run([str(python), str(script), json.dumps(job)], {"OMP_NUM_THREADS": str(threads)})
    return json.loads(output.splitlines()[-1])


def our_steps(case: Case, steps: int, warmup: int) -> list[float]:
    """Seconds of each of our steps: `perf/step_time` of a run of `train.py`."""
    batch = case.prompts * case.samples
    with tempfile.TemporaryDirectory(prefix="trl_step_") as folder:
        flags = {
            "--run-dir": folder,
            "--hf-checkpoint": case.model,
            "--prompt-data": ROWS,
            "--input-key": "input",
            "--label-key": "label",
            "--custom-generate-function-path": "tests.benchmarks._trl_hooks.generate_full_length",
            "--custom-rm-path": "tests.benchmarks._trl_hooks.letters_in_place",
            "--num-rollout": steps + warmup,
            "--rollout-batch-size": case.prompts,
            "--n-samples-per-prompt": case.samples,
            "--global-batch-size": batch,
            "--rollout-max-response-len": case.tokens,
            "--max-tokens-per-gpu": 16384,
            "--lr": 1e-5,
            "--train-device": "cpu",
            "--train-backend": "fsdp",
            "--rollout-engine": "embedded",
        }
        pairs = [str(word) for pair in flags.items() for word in pair]
        switches = ["--apply-chat-template", "--rollout-skip-special-tokens", "--use-dynamic-batch-size"]
        run([sys.executable, "train.py", *pairs, *switches, *case.layout])
        rows = [json.loads(line) for line in (Path(folder) / "metrics.jsonl").read_text().splitlines()]
    seconds = [row["perf/step_time"] for row in rows if "perf/step_time" in row]
    return seconds[warmup:]


def measure(case: Case, python: Path, steps: int, warmup: int, rounds: int) -> dict:
    """Medians of both sides over `rounds` alternating runs."""
    threads = min(2, os.cpu_count() or 1)
    ours: list[float] = []
    reference: list[float] = []
    for _ in range(rounds):
        ours += our_steps(case, steps, warmup)
        reference += trl_steps(case, python, steps, warmup, threads)
    mid_ours, mid_reference = statistics.median(ours), statistics.median(reference)
    print(f"{case.name}: ours {mid_ours:.3f} s, TRL {mid_reference:.3f} s a step", flush=True)
    return {
        "work": {k: v for k, v in asdict(case).items() if k in ("prompts", "samples", "tokens")},
        "ours": round(mid_ours, 4),
        "reference": round(mid_reference, 4),
        "ratio": round(mid_reference / mid_ours, 3),
        "ours_best": round(min(ours), 4),
        "reference_best": round(min(reference), 4),
    }


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", nargs="+", choices=tuple(CASES), default=list(CASES))
    parser.add_argument("--trl-venv", type=Path, default=REPO / "build" / "trl-venv")
    parser.add_argument("--steps", type=int, default=8, help="measured steps of a run")
    parser.add_argument("--warmup", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=2, help="runs of each side, alternating")
    args = parser.parse_args(argv)
    python = trl_python(args.trl_venv)
    results = {}
    for name in args.cases:
        make_assets(CASES[name])
        results[name] = measure(CASES[name], python, args.steps, args.warmup, args.rounds)
    print(json.dumps({"benchmark": "trl_step", "unit": "seconds a step", **results}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
