"""How much of a quick-start step passes while neither engine nor trainer nor transport works.

    python -m tests.benchmarks.driver_overhead [--rollouts 20]

A step's wall time less the rollout function's, the slowest trainer rank's and the weight update's own time, each measured
where the work is done. The first three steps are left out. The limit is 5 % of the step.
"""

from __future__ import annotations

import argparse
import json
from statistics import median

from tests.benchmarks.quickstart_run import read_rows, run_quickstart

LIMIT = 0.05
WORK = (
    "perf/rollout_busy_time",
    "perf/train_busy_time",
    "perf/update_weights_time",
    "perf/eval_time",
    "perf/save_time",
)


def step_times(rows: list[dict]) -> dict[int, dict[str, float]]:
    """The wall-clock metrics of each rollout, merged over its rows."""
    steps: dict[int, dict[str, float]] = {}
    for row in rows:
        if row["step_key"] in ("rollout/step", "eval/step"):
            steps.setdefault(row["step"], {}).update({k: v for k, v in row.items() if k.startswith("perf/")})
    return steps


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rollouts", type=int, default=20)
    options = parser.parse_args()
    steps = step_times(read_rows(run_quickstart("overhead", ["--num-rollout", str(options.rollouts)])))
    shares, walls = [], []
    for step, times in sorted(steps.items()):
        if step < 3:
            continue
        work = sum(times.get(name, 0.0) for name in WORK)
        walls.append(times["perf/step_time"])
        shares.append(1 - work / times["perf/step_time"])
    result = {
        "benchmark": "driver_overhead",
        "steps": len(shares),
        "step_s": round(median(walls), 4),
        "overhead_share": round(median(shares), 4),
        "overhead_share_max": round(max(shares), 4),
        "limit": LIMIT,
        "ratio": round(median(shares) / LIMIT, 3),
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
