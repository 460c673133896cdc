"""`reasoning_gym`: the score, 0 to 1, that the verifier of a reasoning-gym task gives.

A row carries the task's entry in its metadata: `{"entry": {"question": ..., "answer": ..., "metadata": {...}}}`, with
the task's name in `metadata["task"]` or, as reasoning-gym itself writes it, in `entry["metadata"]["source_dataset"]`.
An entry written out flat works too: the entry's own metadata as the row's, and its answer as the label.
The answer is the last `<answer>...</answer>` of the response, or all that follows its reasoning (`</think>`).
"""

from __future__ import annotations

import json
from functools import cache
from typing import Any

from reasoning_gym.factory import DATASETS, get_score_answer_fn
from reasoning_gym.utils import extract_answer

from miles.rollout.rm_hub.failures import REWARD_DATA, RewardFailure


def score(response: str, label: str | None, metadata: dict[str, Any]) -> float:
    task, entry = task_entry(label, metadata)
    answer = extract_answer(response)
    return float(_verifier(task)(answer if answer is not None else response.rpartition("</think>")[2].strip(), entry))


def task_entry(label: str | None, metadata: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    """Task name and entry of a row. Raises: RewardFailure (reward_data) that says what is missing."""
    entry = metadata.get("entry")
    if isinstance(entry, str):
        entry = json.loads(entry)
    if entry is None:
        entry = {"question": metadata.get("question", ""), "answer": label, "metadata": metadata}
    task = metadata.get("task") or (entry.get("metadata") or {}).get("source_dataset")
    if not task:
        raise RewardFailure(
            REWARD_DATA,
            "the row names no reasoning-gym task: put it in metadata['task'], or the whole entry in metadata['entry']",
            permanent=True,
        )
    if entry.get("answer") is None:
        entry = {**entry, "answer": label}
    return task, entry


@cache
def _verifier(task: str) -> Any:
    if task not in DATASETS:
        raise RewardFailure(REWARD_DATA, f"reasoning-gym has no task {task!r}", permanent=True)
    return get_score_answer_fn(task)
