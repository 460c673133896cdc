"""Seeds from names, never from arrival order."""

from __future__ import annotations

import xxhash


def derive_seed(*parts: int | str) -> int:
    """A 63-bit seed from e.g. (run seed, "rollout", step, sample). Equal parts, equal seed; on every machine."""
    return xxhash.xxh3_64("\x1f".join(map(str, parts)).encode()).intdigest() >> 1
