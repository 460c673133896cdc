r"""`deepscaler`: 1 if the `\boxed{}` answer that follows the reasoning is right, else 0.

The reasoning ends with `</think>` or `###Response`; a response that never ends it scores 0.
"""

from __future__ import annotations

from typing import Any

from miles.rollout.rm_hub.boxed import last_boxed
from miles.rollout.rm_hub.math_reward import equal


def score(response: str, label: str | None, metadata: dict[str, Any]) -> float:
    if "</think>" in response:
        solution = response.rpartition("</think>")[2]
    elif "###Response" in response:
        solution = response.partition("###Response")[2]
    else:
        equal("", label)  # a row without a usable label is a data error, whatever the response
        return 0.0
    return boxed_is_right(solution, label)


def boxed_is_right(solution: str, label: str | None) -> float:
    return float(equal(last_boxed(solution) or "", label))
