"""Generation over the whole fleet: which engine takes a request, and what happens when one dies."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator, Callable
from typing import Any

from miles.backends.engine_api.client import EngineClient
from miles.backends.engine_api.errors import EngineError, EngineFailed, EngineTimeout, EngineUnreachable
from miles.router.affinity import Affinity, Place

logger = logging.getLogger(__name__)

_MAX_FAILURES = 4  # of one request with 5xx, whichever engines gave them
_PROBE_TIMEOUT_S = 3.0
_ABORT_REPEAT_S = 0.25
_ABORT_TIMEOUT_S = 60.0


class NoEngineError(EngineError):
    """No engine could serve a request within the time that recovery is given."""


class EnginePool:
    """The engines that serve now, by index. Lives in one event loop.

    A request goes to the engine with the fewest requests in flight, the lowest index among equals; requests with one
    routing key go to one engine, and one data-parallel rank of it, while it lives, so that it finds their prefix in its
    cache. Results do not depend on the choice: sampling is seeded by request.

    `on_dead(index)` is called once for each death that a request discovers; whoever replaces the engine hands the new
    client to `set_engine`. Requests that have no engine wait for one. `on_membership()` is called after every change of who serves.
    """

    def __init__(self, args: Any) -> None:
        # A replacement has to start and to be given the current weights before it serves.
        self.recovery_timeout_s: float = args.engine_start_timeout + args.weight_update_timeout
        self.on_dead: Callable[[int], Any] = lambda index: None
        self.models: dict[str, EnginePool] = {}  # by name, of all models that the run serves (--sglang-config)
        self.on_membership: Callable[[], Any] = lambda: None
        self.on_failure: Callable[[BaseException], Any] = lambda error: None
        self._clients: dict[int, EngineClient] = {}
        self._affinity = Affinity()
        self._changed = asyncio.Event()
        self._failure: BaseException | None = None
        self._last_death = "none has been admitted yet"
        self._abort_epoch = 0
        self._requests: dict[int, int] = {}  # request number -> abort epoch in which it began
        self._next_request = 0

    # ---- membership ------------------------------------------------------------------------------------------------

    def set_engine(self, index: int, client: EngineClient | None) -> None:
        """Let `client` serve as engine `index`, or take the engine out of service with None."""
        if client is None:
            self._clients.pop(index, None)
        else:
            self._clients[index] = client
        self._notify()
        self.on_membership()

    def healthy(self) -> list[int]:
        """Indices of the engines that serve now."""
        return sorted(self._clients)

    def client(self, index: int) -> EngineClient | None:
        return self._clients.get(index)

    def load(self, index: int) -> int:
        """Requests in flight on an engine."""
        return self._affinity.load(index)

    def fail(self, error: BaseException) -> None:
        """Recovery is over: every request that waits, and every later one, raises `error`."""
        self._failure = error
        self._notify()
        self.on_failure(error)

    async def wait_any(self, timeout_s: float | None = None) -> int:
        """The index of the engine that the next request would go to, as soon as one serves. Raises NoEngineError."""
        timeout = self.recovery_timeout_s if timeout_s is None else timeout_s
        return (await self._pick(None, frozenset(), time.monotonic() + timeout)).index

    # ---- requests --------------------------------------------------------------------------------------------------

    async def generate(
        self, payload: dict[str, Any], routing_key: str | None = None, *, timeout_s: float | None = None
    ) -> Any:
        """`/generate` on some engine; on another one, or on its replacement, if that dies.

        Returns the engine's answer. A request that `abort_all` meets while it has no engine answers as aborted, empty.
        Raises EngineRejected as it comes (another engine would refuse too), EngineFailed after a few, NoEngineError when
        no engine comes back in time.
        """
        try:
            return await self._generate(payload, routing_key, timeout_s)
        except _AbortedWhileWaiting:
            return _aborted_answer(payload)

    async def generate_stream(
        self, payload: dict[str, Any], routing_key: str | None = None
    ) -> AsyncIterator[dict[str, Any]]:
        """`/generate` as a stream of chunks. Another engine is tried while nothing has come; later the error is raised."""
        deadline, tries, avoid = time.monotonic() + self.recovery_timeout_s, 0, frozenset[int]()
        while True:
            place = await self._pick(routing_key, avoid, deadline)
            index, begun = place.index, False
            client = self._clients[index]
            try:
                with self._affinity.counted(place):
                    async for chunk in client.generate_stream(
                        place.addressed(_for_try(payload, tries)), routing_key=routing_key
                    ):
                        begun = True
                        yield chunk
                    return
            except (EngineUnreachable, EngineTimeout, EngineFailed) as error:
                dead = not isinstance(error, EngineFailed) and await self._is_dead(index, client, error)
                tries += 1
                if begun or (not dead and tries >= _MAX_FAILURES):
                    raise
                avoid = frozenset({index})

    async def _generate(self, payload: dict[str, Any], routing_key: str | None, timeout_s: float | None) -> Any:
        with self._registered() as epoch:
            deadline, failures, tries = time.monotonic() + self.recovery_timeout_s, 0, 0
            avoid: frozenset[int] = frozenset()
            while True:
                place = await self._pick(routing_key, avoid, deadline, epoch)
                index, client = place.index, self._clients[place.index]
                body, tries = place.addressed(_for_try(payload, tries)), tries + 1
                try:
                    with self._affinity.counted(place):
                        return await client.generate(body, timeout_s=timeout_s, routing_key=routing_key)
                except EngineFailed:
                    failures += 1
                    if failures >= _MAX_FAILURES:
                        raise
                    logger.warning("engine %d failed a request; it is tried again", index, exc_info=True)
                    await asyncio.sleep(0.05 * 2**failures)
                except (EngineUnreachable, EngineTimeout) as error:
                    if await self._is_dead(index, client, error):
                        # The time for recovery runs from each death, not from the request's beginning.
                        deadline = time.monotonic() + self.recovery_timeout_s
                    else:
                        failures += 1
                        if failures >= _MAX_FAILURES:
                            raise
                avoid = frozenset({index})

    async def abort_all(self, *, timeout_s: float = _ABORT_TIMEOUT_S) -> None:
        """Abort every request of this moment and wait until all have answered.

        Repeated until nothing is left, because a request may still be on its way to the engine. Raises EngineTimeout if
        some are not answered in time.
        """
        self._abort_epoch += 1
        self._notify()
        deadline = time.monotonic() + timeout_s
        while left := sum(epoch < self._abort_epoch for epoch in self._requests.values()):
            if time.monotonic() >= deadline:
                raise EngineTimeout(f"{left} requests were still running {timeout_s:g} s after they were aborted")
            clients = list(self._clients.values())
            aborts = [
                client.abort(abort_all=True, timeout_s=max(deadline - time.monotonic(), 0.1)) for client in clients
            ]
            for error in await asyncio.gather(*aborts, return_exceptions=True):
                if isinstance(error, EngineError):
                    logger.warning("abort: %s", error)  # a dead engine's requests end by themselves
                elif isinstance(error, BaseException):
                    raise error
            await self._wait_for_change(min(_ABORT_REPEAT_S, max(deadline - time.monotonic(), 0.01)))

    # ---- choice ----------------------------------------------------------------------------------------------------

    async def _pick(self, key: str | None, avoid: frozenset[int], deadline: float, epoch: int | None = None) -> Place:
        while True:
            if self._failure is not None:
                raise self._failure
            if epoch is not None and epoch != self._abort_epoch:
                raise _AbortedWhileWaiting
            if self._clients:
                return self._affinity.choose({i: c.dp_ranks for i, c in self._clients.items()}, key, avoid)
            left = deadline - time.monotonic()
            if left <= 0:
                raise NoEngineError(
                    f"no engine has served for {self.recovery_timeout_s:g} s (--engine-start-timeout plus "
                    f"--weight-update-timeout); last death: {self._last_death}"
                )
            await self._wait_for_change(left)

    async def _is_dead(self, index: int, client: EngineClient, error: EngineError) -> bool:
        """Whether the engine is gone; reports it once. A lost connection alone does not prove it."""
        if self._clients.get(index) is not client:
            return True  # somebody else has noticed
        if isinstance(error, EngineUnreachable):
            try:
                await client.alive(timeout_s=_PROBE_TIMEOUT_S)
                logger.warning("engine %d lost a connection but is alive: %s", index, error)
                return False
            except EngineError:
                pass
        if self._clients.get(index) is client:
            self._last_death = f"engine {index}: {error}"
            self.set_engine(index, None)
            self.on_dead(index)
        return True

    # ---- bookkeeping -----------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def _registered(self):
        number, self._next_request = self._next_request, self._next_request + 1
        self._requests[number] = self._abort_epoch
        try:
            yield self._abort_epoch
        finally:
            del self._requests[number]
            self._notify()

    def _notify(self) -> None:
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

    async def _wait_for_change(self, timeout_s: float) -> None:
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._changed.wait(), timeout_s)


class _AbortedWhileWaiting(Exception):
    """`abort_all` came while the request had no engine."""


def _for_try(payload: dict[str, Any], tries: int) -> dict[str, Any]:
    # An engine refuses an id that it knows; abort matches by prefix, so the new one is still aborted by the old.
    if tries == 0 or not isinstance(payload.get("rid"), str):
        return payload
    return payload | {"rid": f"{payload['rid']}-retry{tries}"}


def _aborted_answer(payload: dict[str, Any]) -> Any:
    """What an engine answers for a request that is aborted before its first token."""
    ids = payload.get("input_ids")
    rows = ids if ids and isinstance(ids[0], list) else [ids or []]
    reason = {"type": "abort", "message": "aborted while no engine served"}
    answers = [
        {
            "text": "",
            "output_ids": [],
            "meta_info": {
                "id": payload.get("rid"),
                "finish_reason": reason,
                "prompt_tokens": len(row),
                "completion_tokens": 0,
                "cached_tokens": 0,
                "output_token_logprobs": [],
            },
        }
        for row in rows
    ]
    return answers if rows is ids else answers[0]
