"""`random`: 0 or 1 by a coin, for baselines. Different in every run; `deterministic_random` is not."""

from __future__ import annotations

import random
from typing import Any

from miles.utils.types import Sample


async def score(args: Any, sample: Sample, response: str) -> float:
    return float(random.randint(0, 1))
