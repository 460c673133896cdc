"""`deterministic_random`: 0 or 1 by a coin that depends on `--rollout-seed` and the sample's index only."""

from __future__ import annotations

from typing import Any

from miles.utils.seeds import derive_seed
from miles.utils.types import Sample


async def score(args: Any, sample: Sample, response: str) -> float:
    seed = derive_seed(getattr(args, "rollout_seed", 0) or 0, "reward", str(sample.index))
    return float(seed >> 30 & 1)
