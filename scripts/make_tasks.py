"""Write a JSONL file of prompts from a reasoning-gym task: procedurally generated, offline, with a verifier.

    python scripts/make_tasks.py --task chain_sum --config '{"min_terms": 2, "max_terms": 2}' --rows 512 --out sums.jsonl

Each row is `{"input": [user message], "label": answer, "metadata": {"task": ..., "entry": ...}}`; the `metadata` is what
the reward needs to score an answer. The same seed gives the same rows.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def rl_row(task: str, entry: dict[str, Any], suffix: str = "") -> dict[str, Any]:
    """A prompt row of one reasoning-gym entry (`question`, `answer`, `metadata`); `suffix` is added to the question."""
    return {
        "input": [user(entry["question"] + suffix)],
        "label": entry["answer"],
        "metadata": {"task": task, "entry": entry},
    }


def write_jsonl(path: Path, rows: Iterable[dict[str, Any]]) -> None:
    """Write rows to `path`, whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(f".{path.name}.tmp")
    with open(unfinished, "w", encoding="utf-8") as f:
        for row in rows:
            f.write(json.dumps(row, ensure_ascii=False) + "\n")
    unfinished.rename(path)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--task", required=True, help="a reasoning-gym task, e.g. chain_sum")
    parser.add_argument("--config", type=json.loads, default={}, metavar="JSON", help="the task's own settings")
    parser.add_argument("--suffix", default="", help="text added to every question")
    parser.add_argument("--rows", type=int, default=512)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args(argv)

    import reasoning_gym

    try:
        dataset = reasoning_gym.create_dataset(args.task, seed=args.seed, size=args.rows, **args.config)
    except (ValueError, TypeError, AssertionError) as error:  # an unknown task, an unknown setting, a bad value
        parser.error(f"reasoning-gym refuses --task {args.task} --config {json.dumps(args.config)}: {error}")
    write_jsonl(args.out, (rl_row(args.task, entry, args.suffix) for entry in dataset))
    print(f"made {args.out}: {args.rows} rows of {args.task}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
