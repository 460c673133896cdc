"""`remote_rm`: the answer of a reward server.

POSTs `{"prompt", "response", "label"}` as JSON to `--rm-url`; the answer is a number, or a dictionary with `--reward-key`.
"""

from __future__ import annotations

import asyncio
from typing import Any

from miles.rollout.rm_hub.failures import REWARD_ERROR, REWARD_TIMEOUT, RewardFailure
from miles.rollout.rm_hub.timing import TooLate, within
from miles.utils.types import Sample

_ATTEMPTS = 4
_FIRST_PAUSE_S = 0.25
_CONCURRENCY = 64
_RETRIED = {408, 425, 429, 500, 502, 503, 504}

_sessions: dict[asyncio.AbstractEventLoop, tuple[Any, asyncio.Semaphore]] = {}  # one a loop: sessions cannot be shared


def _session() -> tuple[Any, asyncio.Semaphore]:
    import aiohttp

    loop = asyncio.get_running_loop()
    for old in [known for known in _sessions if known.is_closed()]:
        del _sessions[old]
    if loop not in _sessions:
        connector = aiohttp.TCPConnector(limit=_CONCURRENCY)
        session = aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(total=None))
        _sessions[loop] = session, asyncio.Semaphore(_CONCURRENCY)
    return _sessions[loop]


async def close_sessions() -> None:
    """Close this loop's connections to reward servers."""
    held = _sessions.pop(asyncio.get_running_loop(), None)
    if held is not None:
        await held[0].close()


async def score(args: Any, sample: Sample, response: str) -> Any:
    """Ask the server, again when it is out of reach or overloaded; `--reward-timeout` bounds all attempts together.

    Raises: RewardFailure with reward_timeout, or reward_error where the server refused, failed or sent no JSON.
    """
    session, slots = _session()
    payload = {"prompt": sample.prompt, "response": response, "label": sample.label}
    async with slots:  # waiting in line is not on the clock
        try:
            return await within(_ask(session, args.rm_url, payload), args.reward_timeout)
        except TooLate:
            raise RewardFailure(
                REWARD_TIMEOUT,
                f"reward server {args.rm_url} did not score sample {sample.index} within {args.reward_timeout:g} s "
                "(--reward-timeout)",
            ) from None


async def _ask(session: Any, url: str, payload: dict[str, Any]) -> Any:
    import aiohttp

    for attempt in range(_ATTEMPTS):
        last = attempt + 1 == _ATTEMPTS
        try:
            async with session.post(url, json=payload) as reply:
                if reply.status < 400:
                    return await reply.json(content_type=None)
                text = (await reply.text())[:200]
                if last or reply.status not in _RETRIED:
                    raise RewardFailure(
                        REWARD_ERROR, f"reward server {url} answered {reply.status}: {text}", permanent=True
                    )
        except ValueError as error:
            raise RewardFailure(REWARD_ERROR, f"reward server {url} sent no JSON: {error}", permanent=True) from error
        except (aiohttp.ClientError, OSError) as error:
            if last:
                raise RewardFailure(
                    REWARD_ERROR,
                    f"reward server {url} is out of reach after {_ATTEMPTS} attempts: {type(error).__name__}: {error}",
                    permanent=True,
                ) from error
        await asyncio.sleep(_FIRST_PAUSE_S * 2**attempt)
    raise AssertionError("unreachable: the last attempt returns or raises")
