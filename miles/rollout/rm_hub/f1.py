"""`f1`: overlap of the response's words with the label's, 0 to 1, as SQuAD measures answers.

Source: Rajpurkar et al. 2016, "SQuAD", section 6.1: lower case, no punctuation, no articles, F1 of the bags of words.
"""

from __future__ import annotations

import re
import string
from collections import Counter
from typing import Any

from miles.rollout.rm_hub.failures import REWARD_DATA, RewardFailure

_ARTICLES = re.compile(r"\b(a|an|the)\b")
_CLOSED = {"yes", "no", "noanswer"}  # answers that are right or wrong, never partly right


def score(response: str, label: str | None, metadata: dict[str, Any]) -> float:
    if label is None:
        raise RewardFailure(REWARD_DATA, "the row has no label to compare with (--label-key)", permanent=True)
    answer, gold = words(response), words(str(label))
    if " ".join(answer) in _CLOSED | {""} or " ".join(gold) in _CLOSED | {""}:
        return float(answer == gold)
    common = sum((Counter(answer) & Counter(gold)).values())
    if not common:
        return 0.0
    precision, recall = common / len(answer), common / len(gold)
    return 2 * precision * recall / (precision + recall)


def words(text: str) -> list[str]:
    text = "".join(char for char in text.lower() if char not in string.punctuation)
    return _ARTICLES.sub(" ", text).split()
