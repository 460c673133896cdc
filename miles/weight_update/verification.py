"""Did every tensor arrive? The engine's digests against the trainer's manifest."""

from __future__ import annotations

import enum
from dataclasses import dataclass

from miles.backends.engine_api.client import EngineClient
from miles.weight_update.types import Manifest, TransferReport

_MAX_LISTED = 20
# Names of the two ends of a tied embedding. Where the model ties them, either side may list one or both.
_TIED = ("lm_head.weight", "embed_tokens.weight", "wte.weight")


class Problem(enum.Enum):
    MISSING = "the engine does not have it"
    UNEXPECTED = "the trainer did not send it"
    DIFFERENT = "its bytes, dtype or shape differ"


@dataclass(frozen=True)
class Mismatch:
    """One tensor that is not on the engine what it was on the trainer."""

    name: str
    problem: Problem
    detail: str = ""

    def __str__(self) -> str:
        return f"{self.name}: {self.problem.value}" + (f" ({self.detail})" if self.detail else "")


def compare(manifest: Manifest, checksums: dict[str, str]) -> list[Mismatch]:
    """Every tensor that is missing, unexpected or different on the engine, by name; empty when the update is whole.

    The digest covers dtype, shape and bytes (`miles.utils.digest.tensor_digest`).
    """
    found = []
    for name, record in manifest.items():
        got = checksums.get(name)
        if got is None:
            if not tied_twin_matches(name, record.digest, checksums):
                found.append(Mismatch(name, Problem.MISSING, f"{record.dtype} {list(record.shape)}"))
        elif got != record.digest:
            detail = f"sent {record.dtype} {list(record.shape)} with digest {record.digest}, engine has {got}"
            found.append(Mismatch(name, Problem.DIFFERENT, detail))
    sent = {name: record.digest for name, record in manifest.items()}
    for name, digest in checksums.items():
        if name not in manifest and not tied_twin_matches(name, digest, sent):
            found.append(Mismatch(name, Problem.UNEXPECTED))
    return sorted(found, key=lambda m: m.name)


def tied_twin_matches(name: str, digest: str, others: dict[str, str]) -> bool:
    """Whether `name` is one end of a tied embedding whose other end, among `others`, has its digest."""
    if not name.endswith(_TIED):
        return False
    return any(other != name and other.endswith(_TIED) and d == digest for other, d in others.items())


def describe(mismatches: list[Mismatch], total: int) -> str:
    """All mismatches in one line each, capped, for an error message."""
    lines = [f"  {m}" for m in mismatches[:_MAX_LISTED]]
    if len(mismatches) > _MAX_LISTED:
        lines.append(f"  ... and {len(mismatches) - _MAX_LISTED} more")
    return f"{len(mismatches)} of {total} tensors are not what the trainer sent:\n" + "\n".join(lines)


async def verify_engine(client: EngineClient, report: TransferReport, *, timeout_s: float) -> list[Mismatch]:
    """Ask the engine for its digests and compare. Raises the client's errors when it does not answer."""
    checksums = await client.weights_checksums(timeout_s=timeout_s)
    if client.digests != "tensor" and report.served is not None:
        return report.served.compare(checksums)
    return compare(report.manifest, checksums)
