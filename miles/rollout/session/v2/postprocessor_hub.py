"""The last word on the samples of a branching session: `(samples, session_metadata) -> the same samples`."""

from __future__ import annotations

from typing import Any

from miles.utils.types import Sample


def default_postprocess(samples: list[Sample], session_metadata: dict[str, Any]) -> list[Sample]:
    """Nothing more to do: shared generations are trained once already, and the agent's reward is set on every sample."""
    return samples
