"""`ifbench`: 1 if the response follows every checkable instruction of its row, else 0 (IFBench and IFEval).

The row's metadata has `instruction_id_list` (such as `count:word_count_range`), `kwargs` (one dictionary an
instruction) and, where an instruction repeats the prompt, `prompt_text`. The checks are those of the package
if-verifiable, in their strict form.
"""

from __future__ import annotations

from typing import Any

from if_verifiable.common import evaluate_instructions
from if_verifiable.ifbench.instructions_registry import INSTRUCTION_DICT as IFBENCH
from if_verifiable.ifeval.instructions_registry import INSTRUCTION_DICT as IFEVAL

from miles.rollout.rm_hub.failures import REWARD_DATA, RewardFailure


def score(response: str, label: str | None, metadata: dict[str, Any]) -> float:
    ids = list(metadata.get("instruction_id_list") or [])
    arguments = [dict(entry or {}) for entry in metadata.get("kwargs") or [{}] * len(ids)]
    if not ids or len(arguments) != len(ids):
        raise RewardFailure(
            REWARD_DATA,
            f"metadata has {len(ids)} entries in instruction_id_list and {len(arguments)} in kwargs; one each is needed",
            permanent=True,
        )
    prompt = str(metadata.get("prompt_text") or metadata.get("prompt") or "")
    _, scores = evaluate_instructions(response, ids, arguments, prompt, _checks(ids))
    return float(scores.binary_strict)


def _checks(ids: list[str]) -> dict[str, Any]:
    """The benchmark that knows all instructions. The package skips unknown ones, which would make them count as followed."""
    known = {**IFEVAL, **IFBENCH}
    unknown = [name for name in ids if name not in known]
    if unknown:
        raise RewardFailure(REWARD_DATA, f"no check for the instructions {', '.join(unknown)}", permanent=True)
    return known
