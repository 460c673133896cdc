"""Stale asynchronous training with and without importance weights: does the correction change what is learned?

    python -m tests.benchmarks.mismatch_recovery [--picture FILE.png]

Two 30-step runs of `train_async.py` on a random two-layer model, weights sent every fifth rollout, a large learning rate;
the reward is the share of response tokens whose id divides by 8. The picture has both reward curves and how the ratio of
trainer to engine is spread. The last line is JSON; `shown` says whether the uncorrected run lost reward: it is reported, not wanted.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path
from typing import Any

from tests.benchmarks._runs import run_driver
from tests.helpers.tiny_models import make_tiny_model

RATIO = "train/mismatch_ratio/"


async def rare_token_share(args: Any, sample: Any, **kwargs: Any) -> float:
    response = sample.tokens[len(sample.tokens) - sample.response_length :]
    return sum(token % 8 == 0 for token in response) / max(len(response), 1)


def run(folder: Path, name: str, extra: list[str]) -> list[dict[str, float]]:
    """One row of metrics a step."""
    flags = (
        f"--hf-checkpoint {folder / 'model'} --prompt-data {folder / 'prompts.jsonl'} --rollout-engine embedded "
        "--train-backend fsdp --actor-num-gpus-per-node 1 --rollout-num-gpus 1 --num-rollout 30 --rollout-batch-size 4 "
        "--n-samples-per-prompt 8 --global-batch-size 32 --rollout-max-response-len 12 --lr 0.02 --update-weights-interval 5 "
        "--custom-rm-path tests.benchmarks.mismatch_recovery.rare_token_share"
    ).split()
    run_driver(folder / name, [*flags, *extra], driver="train_async.py", timeout_s=300)
    steps: dict[int, dict[str, float]] = {}
    for line in (folder / name / "metrics.jsonl").read_text().splitlines():
        row = json.loads(line)
        steps.setdefault(int(row["step"]), {}).update(row)
    return [steps[i] for i in range(30)]


def draw(runs: dict[str, list[dict[str, float]]], picture: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (rewards, ratios) = pyplot.subplots(1, 2, figsize=(11, 4))
    for name, rows in runs.items():
        rewards.plot([row["rollout/raw_reward"] for row in rows], label=name)
        for part, style in (("p01", ":"), ("p50", "-"), ("p99", "--")):
            ratios.plot([row[RATIO + part] for row in rows], style, label=f"{name}, {part}")
    rewards.set(title="reward", xlabel="rollout")
    ratios.set(title="p(trainer) / p(engine)", xlabel="rollout", yscale="log")
    for axes in (rewards, ratios):
        axes.legend(fontsize=7)
    figure.tight_layout()
    figure.savefig(picture, dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--picture", type=Path, default=Path("mismatch_recovery.png"))
    picture = parser.parse_args().picture
    with tempfile.TemporaryDirectory(prefix="miles-benchmark-") as name:
        folder = Path(name)
        make_tiny_model(folder / "model")
        prompts = [{"input": f"How many apples are {i} and {i + 1}?", "label": "1"} for i in range(24)]
        (folder / "prompts.jsonl").write_text("\n".join(map(json.dumps, prompts)) + "\n")
        runs = {"uncorrected": run(folder, "plain", []), "TIS": run(folder, "tis", ["--use-tis"])}
    draw(runs, picture)
    last = {name: sum(row["rollout/raw_reward"] for row in rows[-5:]) / 5 for name, rows in runs.items()}
    result = {
        "benchmark": "mismatch_recovery",
        "reward_last_5": last,
        "reward_mean": {n: sum(r["rollout/raw_reward"] for r in rows) / 30 for n, rows in runs.items()},
        "ess_min": {n: min(r[RATIO + "ess"] for r in rows) for n, rows in runs.items()},
        "ratio_p99_max": {n: max(r[RATIO + "p99"] for r in rows) for n, rows in runs.items()},
        "shown": last["uncorrected"] < last["TIS"] - 0.05,
        "picture": str(picture),
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
