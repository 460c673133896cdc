r"""`dapo`: +1 or -1 for what follows the last `Answer:` in the response's last 300 characters.

Returns {"score": 1.0 or -1.0, "acc": 1.0 or 0.0, "pred": the normalised answer}; train with `--reward-key score`.
Answers are compared as text after the normalisation of Lewkowycz et al. 2022 (Minerva), appendix D.
"""

from __future__ import annotations

import re
from typing import Any

from miles.rollout.rm_hub.boxed import last_boxed
from miles.rollout.rm_hub.failures import REWARD_DATA, RewardFailure

NO_ANSWER = "[INVALID]"
_TAIL = 300
_ANSWER = re.compile(r"answer\s*:\s*([^\n]+)", re.IGNORECASE)

# Words of units and the like, which change nothing about the value.
_UNITS = [
    "square", "ways", "integers", "dollars", "mph", "inches", "ft", "hours", "km", "units", "points", "feet", "minutes",
    "digits", "cents", "degrees", "cm", "gm", "pounds", "meters", "meals", "edges", "students", "childrentickets",
    "multiples",
]  # fmt: skip
_DROPPED = [
    r"\text{s}", r"\text{.}", r"\text{" + "\ns}", r"\text{}^2", r"\text{}^3", r"\text{" + "\n}", r"\text{}",
    r"\mathrm{th}", r"^\circ", r"^{\circ}", r"\;", r",\!", "{,}", '"', r"\dots",
]  # fmt: skip
_REPLACED = (
    ("an ", ""),
    ("a ", ""),
    (".$", "$"),
    ("\\$", ""),
    (r"\ ", ""),
    (" ", ""),
    ("mbox", "text"),
    (r",\text{and}", ","),
    (r"\text{and}", ","),
    (r"\text{m}", r"\text{}"),
)
_WRAPPERS = (r"\\text\{(.*?)\}", r"\\textbf\{(.*?)\}", r"\\overline\{(.*?)\}", r"\\boxed\{(.*)\}")


def score(response: str, label: str | None, metadata: dict[str, Any]) -> dict[str, Any]:
    if label is None or not str(label).strip():
        raise RewardFailure(REWARD_DATA, "the row has no label to compare with (--label-key)", permanent=True)
    found = _ANSWER.findall(response[-_TAIL:])
    answer = normalize(found[-1]) if found else NO_ANSWER
    gold = str(label)
    if "\\boxed" in gold:
        gold = last_boxed(gold) or gold
    right = answer == normalize(gold)
    return {"score": 1.0 if right else -1.0, "acc": float(right), "pred": answer}


def normalize(answer: str) -> str:
    r"""The canonical text of a final answer: what follows the last `=`, without units, wrappers, `$` and spaces, with
    `\frac12` and `\sqrt3` in braces, and without commas in whole numbers."""
    answer = answer.rpartition("=")[2]
    for old, new in _REPLACED:
        answer = answer.replace(old, new)
    for dropped in [*_UNITS, *_DROPPED]:
        answer = answer.replace(dropped, "")
    answer = re.sub(r"(.*?)(\$)(.*?)(\$)(.*)", r"$\3$", answer)
    for wrapper in _WRAPPERS:
        answer = re.sub(wrapper, r"\1", answer)
    answer = re.sub(r"(frac)([^{])(.)", r"\1{\2}{\3}", answer)
    answer = re.sub(r"(sqrt)([^{])", r"\1{\2}", answer)
    answer = answer.replace("$", "").strip().rstrip(".")
    if answer.replace(",", "").isdigit():
        answer = answer.replace(",", "")
    return answer
