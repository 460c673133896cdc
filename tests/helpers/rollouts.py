"""Rollout functions that tests name by import path."""

from __future__ import annotations

import asyncio

from miles.rollout.base_types import RolloutFnInput, RolloutFnTrainInput
from miles.rollout.inference_rollout import InferenceRolloutFn


class Ahead(InferenceRolloutFn):
    """Begins the next batch before it hands one over, so that weight updates meet requests in flight."""

    _next: asyncio.Task | None = None

    async def __call__(self, input: RolloutFnInput):
        if not isinstance(input, RolloutFnTrainInput):
            return await super().__call__(input)
        batch = await (self._next or self._train(input))
        self._next = asyncio.create_task(self._train(input))
        return batch
