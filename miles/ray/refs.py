"""Ray's answers as awaitables."""

from __future__ import annotations

from typing import Any


async def answer(ref: Any) -> Any:
    """The value of an object reference, as a coroutine that a task can be made of."""
    return await ref
