"""Two quick-start runs with one seed: the same metrics, bit for bit, wall-clock aside.

    python -m tests.benchmarks.determinism [--rollouts 12]

The reference is the second run; the ratio is the share of values that are equal, which must be 1.
"""

from __future__ import annotations

import argparse
import json

from tests.benchmarks.quickstart_run import read_rows, run_quickstart


def reproducible(rows: list[dict]) -> dict[tuple, float]:
    """`(axis, step, metric) -> value` of everything that is not wall-clock."""
    return {
        (row["step_key"], row["step"], name): value
        for row in rows
        for name, value in row.items()
        if name not in ("_time", "step_key", "step") and not name.startswith("perf/")
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rollouts", type=int, default=12)
    options = parser.parse_args()
    flags = ["--num-rollout", str(options.rollouts)]
    first, second = (reproducible(read_rows(run_quickstart(f"determinism-{i}", flags))) for i in (1, 2))
    keys = first.keys() | second.keys()
    different = sorted(key for key in keys if first.get(key) != second.get(key))
    for key in different[:20]:
        print(key, first.get(key), second.get(key))
    result = {
        "benchmark": "determinism",
        "rollouts": options.rollouts,
        "values": len(first),
        "reference_values": len(second),
        "different": len(different),
        "ratio": 1 - len(different) / len(keys),
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
