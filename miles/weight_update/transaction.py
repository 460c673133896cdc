"""One weight update as a transaction over all engines: pause, transfer, verify, commit, resume; or nothing happened.

The order is the one that every server version accepts: pause, flush, begin, updates that do not flush, end, version,
continue. An engine ends in exactly one of three states:

- committed: its weights were verified, it is named `version` and generates again;
- untouched: it holds its former version, whole, and generates again;
- fenced: its weights are in doubt, or it does not answer. It stays paused; the caller must end it before it serves again.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from typing import Any

from miles.backends.engine_api.client import EngineClient, EngineError, EngineRejected
from miles.weight_update.types import EngineEndpoint, TransferReport
from miles.weight_update.verification import Mismatch, describe, verify_engine

logger = logging.getLogger(__name__)
Step = Callable[[EngineClient], Awaitable[Any]]


@dataclass(frozen=True)
class UpdateSettings:
    """How to update. Seconds: `control_s` for each control call, `transfer_s` for all buckets, `verify_s` for the digests."""

    pause_mode: str = "retract"  # abort, retract or in_place
    verify: bool = True
    selector: str = "all"
    skip: tuple[str, ...] = ()  # substrings of tensor names whose difference is only logged
    all_or_nothing: bool = False  # commit nowhere unless every engine verified
    control_s: float = 60.0
    transfer_s: float = 300.0
    verify_s: float = 300.0

    @classmethod
    def from_args(cls, args: Any) -> UpdateSettings:
        limit = args.weight_update_timeout
        return cls(
            pause_mode=args.pause_generation_mode,
            verify=args.verify_weight_update,
            control_s=min(cls.control_s, limit),
            transfer_s=limit,
            verify_s=limit,
        )


@dataclass
class UpdateOutcome:
    """What an update left behind.

    `committed` engines serve `version`; `fenced` ones must be ended; all others serve what they did before. `failures`
    says what happened to an engine, or, under None, to the transfer.
    """

    version: int
    committed: set[int] = field(default_factory=set)
    fenced: set[int] = field(default_factory=set)
    failures: dict[int | None, str] = field(default_factory=dict)
    timings: dict[str, float] = field(default_factory=dict)
    report: TransferReport | None = None
    verified: bool = False

    @property
    def succeeded(self) -> bool:
        """Whether `version` exists now: some engine serves it, and none serves doubtful weights."""
        return bool(self.committed)

    @property
    def error(self) -> str | None:
        """Everything that went wrong, an engine's loss in an otherwise successful update included."""
        parts = [text if index is None else f"engine {index}: {text}" for index, text in self.failures.items()]
        return "; ".join(parts) or None

    def metrics(self) -> dict[str, float]:
        """Seconds under `perf/update_weights/`, sizes, and whether what serves was verified by digest (1.0 or 0.0)."""
        out = {f"perf/update_weights/{name}": seconds for name, seconds in self.timings.items()}
        if self.report is not None:
            out["perf/update_weights/gather_s"] = self.report.gather_s
            out["perf/update_weights/transfer_s"] = self.report.transfer_s
            out["perf/update_weights/bytes"] = float(self.report.nbytes)
            out["perf/update_weights/buckets"] = float(self.report.buckets)
        out["contract/weight_digest_verified"] = float(self.verified)
        return out


async def run_update(
    args: Any,
    version: int,
    engines: list[EngineEndpoint],
    transfer: Callable[[], Awaitable[TransferReport]],
) -> UpdateOutcome:
    """Update `engines` to `version` by `transfer()`, as Transaction describes.

    What engines and transfer do wrong is in the outcome, never raised.
    """
    settings = UpdateSettings.from_args(args)
    async with clients_of(engines, settings) as clients:
        return await Transaction(settings, version, clients, transfer).run()


@asynccontextmanager
async def clients_of(engines: list[EngineEndpoint], settings: UpdateSettings) -> AsyncIterator[dict[int, EngineClient]]:
    """A client for each engine, by its index; closed at the end."""
    clients = {
        e.index: EngineClient(e.url, admin_key=e.admin_key, control_timeout_s=settings.control_s, digests=e.digests)
        for e in engines
    }
    try:
        yield clients
    finally:
        await asyncio.gather(*(client.close() for client in clients.values()))


class Transaction:
    """One update of `clients` (by engine index) to `version`.

    `transfer()` delivers the weights and returns its report. If it raises, its `touched` attribute (see
    WeightTransferError) says which engines may have loaded something; without one, all may have.
    `doubtful` engines hold no version to go back to: whatever fails, they do not resume.
    """

    def __init__(
        self,
        settings: UpdateSettings,
        version: int,
        clients: dict[int, EngineClient],
        transfer: Callable[[], Awaitable[TransferReport]],
        doubtful: frozenset[int] = frozenset(),
    ) -> None:
        self.settings, self.clients, self.transfer = settings, clients, transfer
        self.outcome = UpdateOutcome(version)
        self._open: set[int] = set()  # engines with an update session
        self._doubtful = doubtful
        self._touched: set[int] = set(doubtful)
        self._paused_at: float | None = None

    async def run(self) -> UpdateOutcome:
        """Carry out the update. Cancelling it rolls back first, within the control deadline."""
        outcome = self.outcome
        if not self.clients:
            outcome.failures[None] = "there is no engine to update"
            return outcome
        try:
            if await self._prepare() and await self._transfer():
                await self._commit(await self._verify())
        finally:
            await asyncio.shield(self._roll_back())
        if outcome.failures:
            level = logging.WARNING if outcome.succeeded else logging.ERROR
            logger.log(level, "weight update to version %d: %s", outcome.version, outcome.error)
        return outcome

    # ---- steps -----------------------------------------------------------------------------------------------------

    async def _prepare(self) -> bool:
        """Engines are this run's and not ahead, then paused, flushed and open for the update. False if any is not."""
        settings = self.settings
        with self._timed("prepare_s"):
            ready = await self._on(self.clients, self._check_version)
            if not ready:
                return False
            self._paused_at = time.monotonic()
            ready = await self._on(self.clients, lambda c: c.pause(settings.pause_mode))
            if ready and settings.pause_mode != "in_place":  # in_place keeps the KV cache of frozen requests
                ready = await self._on(self.clients, lambda c: c.flush())
            return ready and await self._on(self.clients, self._begin, self._open)

    async def _begin(self, client: EngineClient) -> None:
        selector = self.settings.selector
        try:
            await client.begin_weight_update(selector)
        except EngineRejected as first:
            # An update that broke off may have left its session open; nobody else opens one.
            try:
                await client.end_weight_update()
                await client.begin_weight_update(selector)
            except EngineRejected:
                raise first from None

    async def _check_version(self, client: EngineClient) -> None:
        reported = str((await client.model_info()).get("weight_version", ""))
        if reported.isdigit() and int(reported) > self.outcome.version:
            raise EngineError(f"it serves version {reported} already, which is newer than {self.outcome.version}")

    async def _transfer(self) -> bool:
        self._touched = set(self.clients)  # until the transfer says otherwise
        # The trainer has the same deadline and knows more; this one is for a trainer that does not answer at all.
        limit = self.settings.transfer_s * 1.1 + 10
        with self._timed("transfer_s"):
            try:
                self.outcome.report = await asyncio.wait_for(self.transfer(), limit)
                return True
            except TimeoutError:
                self.outcome.failures[None] = f"the trainer did not finish its transfer within {limit:g} s"
            except Exception as error:
                touched = getattr(error, "touched", None)
                if touched is not None:
                    self._touched = (set(touched) | self._doubtful) & set(self.clients)
                self.outcome.failures[None] = f"the transfer failed: {error}"
        return False

    async def _verify(self) -> set[int]:
        """Engines that hold what was sent."""
        if not self.settings.verify:
            return set(self.clients)
        report = self.outcome.report
        verified: set[int] = set()
        assert report is not None

        async def check(client: EngineClient) -> None:
            found = await verify_engine(client, report, timeout_s=self.settings.verify_s)
            if ignored := [m for m in found if self._is_skipped(m)]:
                logger.info("%s, by the skip list: %s", client.base_url, describe(ignored, len(report.manifest)))
            if wrong := [m for m in found if not self._is_skipped(m)]:
                raise EngineError(describe(wrong, len(report.manifest)))

        with self._timed("verify_s"):
            whole = await self._on(self.clients, check, verified)
        if self.settings.all_or_nothing and not whole:
            return set()
        self.outcome.verified = bool(verified)
        return verified

    def _is_skipped(self, mismatch: Mismatch) -> bool:
        return any(part in mismatch.name for part in self.settings.skip)

    async def _commit(self, verified: set[int]) -> None:
        """The version exists from here on; an engine that cannot follow is fenced."""
        version = self.outcome.version

        async def follow(client: EngineClient) -> None:
            await client.end_weight_update()
            await client.update_weight_version(version, abort_all_requests=False)
            await client.continue_()

        with self._timed("commit_s"):
            await self._on({i: self.clients[i] for i in verified}, follow, self.outcome.committed)

    async def _roll_back(self) -> None:
        """Let every engine go on that can; fence the rest. After a commit only the lost ones are left to fence."""
        outcome = self.outcome
        left = {i: c for i, c in self.clients.items() if i not in outcome.committed}
        outcome.fenced |= {i for i in left if i in self._touched}
        untouched = {i: c for i, c in left.items() if i not in outcome.fenced}
        resumed: set[int] = set()

        async def resume(client: EngineClient) -> None:
            if any(self.clients[i] is client for i in self._open):
                await client.end_weight_update()
            await client.continue_()

        if self._paused_at is not None:
            await self._on(untouched, resume, resumed)
            outcome.fenced |= set(untouched) - resumed
            outcome.timings["pause_s"] = time.monotonic() - self._paused_at
        else:  # nothing was paused: only an engine that does not answer is lost
            outcome.fenced |= {i for i in untouched if i in outcome.failures}

    # ---- helpers ---------------------------------------------------------------------------------------------------

    async def _on(self, clients: dict[int, EngineClient], step: Step, done: set[int] | None = None) -> bool:
        """Run `step` on all at once, whatever the others do; collect those that managed, note the failures of the rest."""
        indices = list(clients)
        results = await asyncio.gather(*(step(clients[i]) for i in indices), return_exceptions=True)
        for index, result in zip(indices, results, strict=True):
            if isinstance(result, EngineError):
                self.outcome.failures.setdefault(index, str(result))
            elif isinstance(result, BaseException):
                raise result
            elif done is not None:
                done.add(index)
        return all(not isinstance(r, BaseException) for r in results)

    @contextmanager
    def _timed(self, name: str) -> Iterator[None]:
        started = time.monotonic()
        try:
            yield
        finally:
            self.outcome.timings[name] = time.monotonic() - started
