r"""`math`: 1 if the answer equals the label as mathematics, judged by math-verify, else 0.

The answer is the last `\boxed{}`; a response without one is searched for its final expression.
"""

from __future__ import annotations

import logging
from typing import Any

from math_verify import parse, verify

from miles.rollout.rm_hub.boxed import last_boxed
from miles.rollout.rm_hub.failures import REWARD_DATA, RewardFailure

logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns that its clock, which is the pool's here, is off


def score(response: str, label: str | None, metadata: dict[str, Any]) -> float:
    boxed = last_boxed(response)
    return float(equal(response if boxed is None else boxed, label, is_answer=boxed is not None))


def equal(answer: str, label: str | None, *, is_answer: bool = True) -> bool:
    """Whether `answer` is the same mathematics as `label`.

    Args:
        is_answer: `answer` is the bare answer; False for a whole text that has it somewhere.
    A label that is no mathematics can only be equal as text.
    Raises: RewardFailure (reward_data) for no label.
    """
    gold_text = last_boxed(label or "") or (label or "").strip()
    if not gold_text:
        raise RewardFailure(REWARD_DATA, "the row has no label to compare with (--label-key)", permanent=True)
    if is_answer and _bare(answer) == _bare(gold_text):
        return True
    gold = _parse(gold_text)
    return bool(gold) and bool(verify(gold, _parse(answer, whole_text=not is_answer), timeout_seconds=None))


def _bare(text: str) -> str:
    return "".join(text.split()).strip("$").rstrip(".")


def _parse(text: str, *, whole_text: bool = False) -> list[Any]:
    """Expressions in `text`. The clock is the scoring pool's: math-verify's own needs signals on the main thread."""
    if not whole_text and "$" not in text:
        text = rf"\boxed{{{text}}}"
    return parse(text, parsing_timeout=None)
