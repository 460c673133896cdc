"""The sending side of a weight update, on every trainer rank."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch.distributed as dist

from miles.backends.training_utils.agreement import gather_objects
from miles.backends.training_utils.backend import TrainBackend
from miles.weight_update.buckets import FlatBucket, pack_buckets
from miles.weight_update.errors import WeightTransferError
from miles.weight_update.served_digests import ServedDigestBuilder, ServedDigests
from miles.weight_update.transports.base import WeightTransport, load_transport
from miles.weight_update.types import Bucket, EngineEndpoint, Manifest, TransferReport


@dataclass
class _Sending:
    """One transfer as a source rank sees it."""

    manifest: Manifest = field(default_factory=dict)
    kept: list[FlatBucket] = field(default_factory=list)
    buckets: int = 0
    nbytes: int = 0
    gather_s: float = 0.0
    served: ServedDigestBuilder | None = None  # only where a server joins what it is sent
    digests_on_host: bool = True  # of each tensor; else servers that join tensors on GPUs are all that there is
    error: WeightTransferError | None = None


class WeightUpdater:
    """Turns the model into buckets and sends them, with a digest of every tensor as it was sent.

    `transfer` is collective over the trainer's ranks. Only source ranks (one, or one a pipeline stage) hold whole tensors
    and talk to engines; what happens to them, all ranks learn, so that none waits for another in a collective.
    """

    def __init__(self, args: Any, backend: TrainBackend, transport: WeightTransport | None = None) -> None:
        self.args, self.backend = args, backend
        self._transport = transport
        self._sources: list[int] | None = None
        self._published: tuple[int, list[FlatBucket], Manifest, ServedDigests | None] | None = None

    def transfer(self, version: int, engines: list[EngineEndpoint]) -> TransferReport | None:
        """Send every weight to `engines` as `version`. Collective.

        Returns: the report on the first source rank, None on the others.
        Raises: WeightTransferError on every rank when any source failed, with what failed and which engines are in doubt.
        """
        started = time.monotonic()
        sending = _Sending()
        sending.served = _foretelling(engines)
        sending.digests_on_host = any(e.digests != "served-gpu" for e in engines)
        if self._is_source():
            self._try(sending, lambda: self._connected(engines))
        for bucket in self._gathered(sending):
            if self.backend.is_weight_source and sending.error is None:
                self._try(sending, lambda bucket=bucket: self._send(sending, bucket))
        if self.backend.is_weight_source and sending.error is None:
            self._try(sending, self.transport.finish)
        self._raise_together(sending.error)
        if self.args.keep_published_weights and self.backend.is_weight_source:
            self._published = (version, sending.kept, sending.manifest, _finished(sending))
        transfer_s = time.monotonic() - started - sending.gather_s
        return self._report(version, sending, transfer_s)

    def resend(self, version: int, engines: list[EngineEndpoint]) -> TransferReport | None:
        """Send the weights of `version` again, from the copy that the last transfer kept (`--keep-published-weights`).

        Not collective: each source rank sends its own, and it may run in a second thread beside a training step. Returns
        the report of a source rank's part, None on other ranks.
        """
        if not self.backend.is_weight_source:
            return None
        started = time.monotonic()
        if self._published is None or self._published[0] != version:
            held = "none" if self._published is None else f"version {self._published[0]}"
            raise WeightTransferError(f"no copy of version {version} is kept here (there is {held})", frozenset())
        _, buckets, manifest, served = self._published
        transport = self._new_transport()
        try:
            transport.connect(engines)
            for bucket in buckets:
                transport.send(bucket)
            transport.finish()
        finally:
            transport.close()
        seconds = time.monotonic() - started
        nbytes = sum(b.nbytes for b in buckets)
        return TransferReport(version, manifest, len(buckets), nbytes, 0.0, seconds, served)

    def close(self) -> None:
        """Leave the engines' group."""
        if self._transport is not None:
            self._transport.close()
            self._transport = None

    # ---- one transfer, step by step --------------------------------------------------------------------------------

    @property
    def transport(self) -> WeightTransport:
        if self._transport is None:
            self._transport = self._new_transport()
        return self._transport

    def _new_transport(self) -> WeightTransport:
        sources = self._sources or [0]
        rank = dist.get_rank() if dist.is_initialized() else 0
        return load_transport(self.args, sources.index(rank) if rank in sources else 0, len(sources))

    def _is_source(self) -> bool:
        """Collective the first time: learns which ranks send."""
        if self._sources is None:
            flags = gather_objects(self.backend.is_weight_source)
            self._sources = [rank for rank, sends in enumerate(flags) if sends]
            if not self._sources:
                raise RuntimeError("no trainer rank says that it is a weight source: nobody would send the weights")
        return self.backend.is_weight_source

    def _connected(self, engines: list[EngineEndpoint]) -> None:
        if not engines:
            raise WeightTransferError("there is no engine to send weights to", frozenset())
        self.transport.connect(engines)

    def _gathered(self, sending: _Sending) -> Iterator[Bucket]:
        """Buckets as the backend's collectives yield them. Always run to its end, on every rank."""
        buckets = pack_buckets(self.backend.iter_weights(), self.args.update_weight_buffer_size)
        while True:
            started = time.monotonic()
            bucket = next(buckets, None)
            sending.gather_s += time.monotonic() - started
            if bucket is None:
                return
            yield bucket

    def _send(self, sending: _Sending, bucket: Bucket) -> None:
        flat = FlatBucket(bucket)
        if twice := [name for name in flat.names if name in sending.manifest] or _repeated(flat.names):
            raise WeightTransferError(f"the trainer exports {twice[0]} twice", frozenset())
        self.transport.send(flat)
        # The rest is done while the bucket travels.
        served = sending.served
        if served is not None and served.on_device:
            for name, tensor in flat.tensors():
                served.add(name, tensor)
            served.flush()
        if self.args.keep_published_weights:
            sending.kept.append(flat.to_host())
        host = flat.data.cpu() if sending.digests_on_host else None
        sending.manifest |= flat.records(host)
        if served is not None and not served.on_device:
            for name, tensor in flat.tensors(host):
                served.add(name, tensor)
        sending.buckets += 1
        sending.nbytes += flat.nbytes

    def _try(self, sending: _Sending, step: Any) -> None:
        """Run a step of a source rank; a failure ends the sending and is kept for all ranks to learn."""
        try:
            step()
        except Exception as error:
            touched = error.touched if isinstance(error, WeightTransferError) else frozenset()
            if self._transport is not None:
                touched |= self._transport.touched
                self._transport.abandon()
            text = str(error) if isinstance(error, WeightTransferError) else f"{type(error).__name__}: {error}"
            sending.error = WeightTransferError(text, touched)

    def _raise_together(self, error: WeightTransferError | None) -> None:
        # A source that did well has touched its engines too: without the others' part, they hold no whole version.
        touched = error.touched if error is not None else getattr(self._transport, "touched", frozenset())
        verdicts = gather_objects((None if error is None else str(error), touched))
        failed = [f"trainer rank {rank}: {text}" for rank, (text, _) in enumerate(verdicts) if text is not None]
        if failed:
            raise WeightTransferError("; ".join(failed), frozenset().union(*(t for _, t in verdicts)))

    def _report(self, version: int, sending: _Sending, transfer_s: float) -> TransferReport | None:
        assert self._sources is not None
        mine = TransferReport(
            version,
            sending.manifest,
            sending.buckets,
            sending.nbytes,
            sending.gather_s,
            transfer_s,
            _finished(sending),
        )
        if len(self._sources) == 1:
            return mine if self.backend.is_weight_source else None
        reports = [
            report for report in gather_objects(mine if self.backend.is_weight_source else None) if report is not None
        ]
        return merge_reports(reports) if dist.get_rank() == self._sources[0] else None


def merge_reports(reports: list[TransferReport]) -> TransferReport:
    """Sources send at the same time, so times overlap. Pipeline stages send disjoint tensors, whose sizes add up; sources that
    each send the whole model, to an engine of their own, send one model's size to each engine."""
    manifest: Manifest = {}
    for report in reports:
        manifest |= report.manifest
    sizes = reports[:1] if reports[0].manifest.keys() == reports[-1].manifest.keys() else reports
    return TransferReport(
        reports[0].version,
        manifest,
        sum(r.buckets for r in sizes),
        sum(r.nbytes for r in sizes),
        max(r.gather_s for r in reports),
        max(r.transfer_s for r in reports),
        ServedDigests.merged([r.served for r in reports if r.served is not None]),
    )


def _foretelling(engines: list[EngineEndpoint]) -> ServedDigestBuilder | None:
    """What foretells the checksums of servers that join tensors; None where there is none."""
    forms = {e.digests for e in engines}
    if forms <= {"tensor"}:
        return None
    if len(forms - {"tensor"}) > 1:
        raise WeightTransferError("engines on CPUs and on GPUs in one run cannot be verified together", frozenset())
    return ServedDigestBuilder(*(forms - {"tensor"}))


def _finished(sending: _Sending) -> ServedDigests | None:
    return sending.served.finish() if sending.served is not None else None


def _repeated(names: list[str]) -> list[str]:
    return [name for i, name in enumerate(names) if name in names[:i]] if len(set(names)) != len(names) else []
