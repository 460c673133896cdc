r"""`gpqa`: 1 if the response picks the right letter of a multiple-choice question, else 0.

The right letter is `metadata["correct_letter"]`, or the label: a letter, or the text of one of `metadata["choices"]`.
Read in this order, of what follows the reasoning: a `\boxed{}` letter, the last "answer: X" or "answer is X", the last
"(X)" or a letter on a line of its own.
"""

from __future__ import annotations

import re
import string
from typing import Any

from miles.rollout.rm_hub.boxed import last_boxed
from miles.rollout.rm_hub.failures import REWARD_DATA, RewardFailure


def score(response: str, label: str | None, metadata: dict[str, Any]) -> float:
    choices = list(metadata.get("choices") or [])
    letters = _letters(metadata, choices)
    return float(chosen_letter(response, letters) == _correct_letter(label, metadata, choices, letters))


def _letters(metadata: dict[str, Any], choices: list[str]) -> str:
    """The letters that may be chosen: the row's own, as many as there are choices, or A to H."""
    own = metadata.get("valid_letters")
    if own:
        return "".join(own).upper()
    return string.ascii_uppercase[: len(choices) or 8]


def _correct_letter(label: str | None, metadata: dict[str, Any], choices: list[str], letters: str) -> str:
    for candidate in (metadata.get("correct_letter"), label):
        text = str(candidate or "").strip().strip("()").upper()
        if len(text) == 1 and text in letters:
            return text
    folded = [_folded(choice) for choice in choices]
    if label is not None and folded.count(_folded(label)) == 1:
        return letters[folded.index(_folded(label))]
    raise RewardFailure(
        REWARD_DATA,
        f"no right letter: metadata['correct_letter'] is {metadata.get('correct_letter')!r} and the label {label!r} is "
        f"neither one of {letters} nor one of metadata['choices']",
        permanent=True,
    )


def _folded(text: str) -> str:
    return " ".join(str(text).lower().split())


def chosen_letter(response: str, letters: str) -> str | None:
    """The letter that the response settles on, or None."""
    text = response.rpartition("</think>")[2]
    letter = f"([{letters}])"
    boxed = re.fullmatch(rf"\W*(?:\\text\{{)?\W*{letter}\W*", last_boxed(text) or "", re.IGNORECASE)
    if boxed:
        return boxed[1].upper()
    # Only capitals count outside a box: "the answer is a mystery" chooses nothing.
    said = re.findall(rf"(?i:answer|choice|option)(?i:\s+is)?\s*[:=]?\s*[*(\[$\s]*{letter}(?![A-Za-z'])", text)
    alone = re.findall(rf"\({letter}\)|^\W*{letter}\W*$", text, re.MULTILINE)
    if said:
        return said[-1].upper()
    return "".join(alone[-1]) if alone else None
