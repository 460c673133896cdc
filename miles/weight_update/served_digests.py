"""What an SGLang server's checksums must be after an update, foretold from the tensors as they are sent.

SGLang is sent tensors under Hugging Face names, and keeps some of them joined: query, key and value projections in one
tensor, gate and up in another, all experts of a layer in two. Its checker digests what it keeps. Joining along the first
dimension puts bytes one after the other, so a digest of the whole needs no whole: the parts are fed to it as they pass.

Covers what a server of one rank keeps on a CPU: there the digest is the first 8 bytes of SHA-256.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from miles.weight_update.verification import Mismatch, Problem, tied_twin_matches

# part -> (what it is joined into, its place)
_JOINED = {"q_proj": ("qkv_proj", 0), "k_proj": ("qkv_proj", 1), "v_proj": ("qkv_proj", 2)}
_JOINED |= {"gate_proj": ("gate_up_proj", 0), "up_proj": ("gate_up_proj", 1)}
_PARTS = {"qkv_proj": 3, "gate_up_proj": 2}
_EXPERT = re.compile(r"(.*\.experts)\.(\d+)\.(gate_proj|up_proj|down_proj)\.weight")
_EMBEDDINGS = ("embed_tokens.weight", "lm_head.weight")
_VOCAB_MULTIPLE = 64  # a vocabulary is padded to it, with rows of zeros


@dataclass
class _Whole:
    """A tensor that the server keeps, and the digest of those of its parts that have come, in order."""

    state: Any = field(default_factory=hashlib.sha256)
    next: int = 0
    early: dict[int, bytes] = field(default_factory=dict)  # parts that came before their turn
    parts: list[str] = field(default_factory=list)

    def add(self, place: int, name: str, data: bytes) -> None:
        self.parts.append(name)
        self.early[place] = data
        while self.next in self.early:
            self.state.update(self.early.pop(self.next))
            self.next += 1


@dataclass(frozen=True)
class ServedDigests:
    """Digests by the server's names, and which sent tensors each covers."""

    digests: dict[str, str]
    parts: dict[str, tuple[str, ...]]

    @classmethod
    def merged(cls, parts: Sequence[ServedDigests]) -> ServedDigests | None:
        """Of several senders, each of which sent whole layers; None where there are none."""
        if not parts:
            return None
        digests = {name: digest for one in parts for name, digest in one.digests.items()}
        return cls(digests, {name: sent for one in parts for name, sent in one.parts.items()})

    def compare(self, checksums: dict[str, str]) -> list[Mismatch]:
        """Every tensor that is missing, unexpected or different on the server, by name; empty when the update is whole."""
        found = []
        for name, got in checksums.items():
            expected = self.digests.get(name)
            if expected is None:
                if not tied_twin_matches(name, got, self.digests):
                    found.append(Mismatch(name, Problem.UNEXPECTED))
            elif got != expected:
                parts = "" if self.parts[name] == (name,) else f", joined from {', '.join(self.parts[name][:3])}"
                found.append(Mismatch(name, Problem.DIFFERENT, f"digest {expected} was sent, {got} is served{parts}"))
        covered = {part for name in checksums for part in self.parts.get(name, ())}
        sent = {part for parts in self.parts.values() for part in parts}
        for name in sent - covered:
            if not tied_twin_matches(name, self.digests.get(name, ""), checksums):
                found.append(Mismatch(name, Problem.MISSING))
        return sorted(found, key=lambda m: m.name)


class ServedDigestBuilder:
    """Takes each tensor that is sent, in any order; `finish` gives what the server must answer."""

    def __init__(self) -> None:
        self._wholes: dict[str, _Whole] = {}

    def add(self, name: str, tensor: torch.Tensor) -> None:
        """`tensor` as it was sent, in the dtype that the server keeps. Copies a device tensor to the host."""
        data = tensor.detach().contiguous().cpu().reshape(-1).view(torch.uint8).numpy().tobytes()
        for whole, place in _wholes_of(name):
            self._wholes.setdefault(whole, _Whole()).add(place, name, data)
        if name.endswith(_EMBEDDINGS) and (missing := -tensor.shape[0] % _VOCAB_MULTIPLE):
            self._wholes[name].state.update(bytes(missing * (len(data) // tensor.shape[0])))

    def finish(self) -> ServedDigests:
        complete = {n: w for n, w in self._wholes.items() if not w.early and w.next >= _parts_needed(n)}
        return ServedDigests(
            {name: whole.state.hexdigest()[:16] for name, whole in complete.items()},
            {name: tuple(whole.parts) for name, whole in complete.items()},
        )


def _wholes_of(name: str) -> list[tuple[str, int]]:
    """The tensors that a server may keep `name` in, with its place there: by itself, or joined with others."""
    if match := _EXPERT.fullmatch(name):
        experts, number, part = match[1], int(match[2]), match[3]
        if part == "down_proj":
            return [(f"{experts}.w2_weight", number)]
        return [(f"{experts}.w13_weight", 2 * number + (part == "up_proj"))]
    alone = [(name, 0)]
    for part, (whole, place) in _JOINED.items():
        head, found, tail = name.rpartition(f".{part}.")
        if found:
            return [*alone, (f"{head}.{whole}.{tail}", place)]
    return alone


def _parts_needed(name: str) -> int:
    return next((count for whole, count in _PARTS.items() if f".{whole}." in name), 1)
