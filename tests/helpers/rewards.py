"""Reward functions that tests name by import path."""

from __future__ import annotations

import asyncio

from miles.utils.types import Sample


async def even_token_share(args, sample: Sample, **kwargs) -> float:
    """Share of response tokens with an even id: dense, cheap, and something GRPO can raise."""
    response = sample.tokens[len(sample.tokens) - sample.response_length :]
    return sum(token % 2 == 0 for token in response) / max(len(response), 1)


async def slow_even_token_share(args, sample: Sample, **kwargs) -> float:
    """The same after a pause, so that a test can act in mid-rollout."""
    await asyncio.sleep(1.0)
    return await even_token_share(args, sample)


async def broken(args, sample: Sample, **kwargs) -> float:
    raise RuntimeError("the verifier is broken")


async def fails_for_odd_indices(args, sample: Sample, **kwargs) -> float:
    """Fails once in a while: the first attempt at every fourth group."""
    if sample.group_index is not None and sample.group_index % 4 == 1 and not sample.metadata.get("retried"):
        sample.metadata["retried"] = True
        raise RuntimeError("flaky verifier")
    return await even_token_share(args, sample)
