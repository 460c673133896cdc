"""A rollout that never ends: the engines stay up, for somebody to talk to them."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

logger = logging.getLogger(__name__)

_NOTICE_S = 3600.0


async def sleep(args: Any, rollout_id: int, data_source: Any, evaluation: bool = False) -> None:
    """The `--rollout-function-path` for holding a cluster of engines; ends when the run is interrupted."""
    hours = 0
    while True:
        logger.info("sleeping with the engines up for %d h; interrupt the run to end it", hours)
        await asyncio.sleep(_NOTICE_S)
        hours += 1
