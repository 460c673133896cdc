r"""`gemma_math`: 1 if the `\boxed{}` answer is right, else 0; of a response that thinks, only what follows the last `<channel|>`."""

from __future__ import annotations

from typing import Any

from miles.rollout.rm_hub.deepscaler import boxed_is_right


def score(response: str, label: str | None, metadata: dict[str, Any]) -> float:
    return boxed_is_right(response.rpartition("<channel|>")[2], label)
