"""What an SGLang server's checksums must be after an update, foretold from the tensors as they are sent.

SGLang is sent tensors under Hugging Face names, and keeps some of them joined: query, key and value projections in one
tensor, gate and up in another, all experts of a layer in two. Its checker digests what it keeps. Joining along the first
dimension puts bytes one after the other, so a SHA-256 of the whole needs no whole: the parts are fed to it as they pass.

Covers what a server of one rank keeps. On a CPU the digest is the first 8 bytes of SHA-256; on a GPU it is a sum over words
(`tile_hash`), for which a whole is put together on the device where its parts are.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from miles.weight_update.tile_hash import tile_hashes
from miles.weight_update.verification import Mismatch, Problem, tied_twin_matches

# part -> (what it is joined into, its place)
_JOINED = {"q_proj": ("qkv_proj", 0), "k_proj": ("qkv_proj", 1), "v_proj": ("qkv_proj", 2)}
_JOINED |= {"gate_proj": ("gate_up_proj", 0), "up_proj": ("gate_up_proj", 1)}
_PARTS = {"qkv_proj": 3, "gate_up_proj": 2}
_EXPERT = re.compile(r"(.*\.experts)\.(\d+)\.(gate_proj|up_proj|down_proj)\.weight")
_EXPERTS = (".w13_weight", ".w2_weight")
_EMBEDDINGS = ("embed_tokens.weight", "lm_head.weight")
_VOCAB_MULTIPLE = 64  # a vocabulary is padded to it, with rows of zeros


class _Sha256:
    """Digests bytes as they come; nothing is kept."""

    def __init__(self) -> None:
        self._state = hashlib.sha256()

    def feed(self, data: torch.Tensor) -> None:
        self._state.update(data.cpu().numpy())  # type: ignore[arg-type]  # numpy arrays are buffers

    def result(self) -> str:
        return self._state.hexdigest()[:16]


class _Parts:
    """Keeps the parts of a tensor until it is digested together with others."""

    def __init__(self) -> None:
        self.parts: list[torch.Tensor] = []

    def feed(self, data: torch.Tensor) -> None:
        self.parts.append(data)


class _Whole:
    """A tensor that the server keeps, and those of its parts that have come.

    `needed`: how many parts there are; None where only the last tensor of the model tells.
    """

    def __init__(self, sink: _Sha256 | _Parts, needed: int | None) -> None:
        self.sink, self._needed = sink, needed
        self._next = 0
        self._early: dict[int, torch.Tensor] = {}  # parts that came before their turn
        self.names: list[str] = []

    def add(self, place: int, name: str, data: torch.Tensor, padding: int = 0) -> None:
        """`padding`: bytes of zeros after the part."""
        self.names.append(name)
        self._early[place] = data
        while self._next in self._early:
            self.sink.feed(self._early.pop(self._next))
            self._next += 1
        if padding:
            self.sink.feed(data.new_zeros(padding))

    def is_complete(self, last: bool = False) -> bool:
        """Whether all parts have come. `last`: no more will."""
        if self._needed is None:
            return last and not self._early
        return self._next == self._needed


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
    """Takes each tensor that is sent, in any order; `finish` gives what the server must answer.

    `form`: which server, "served" or "served-gpu" (see `miles.backends.engine_api.capabilities`). For the latter, tensors
    are best given where they are, and must not change until a later `flush`.
    """

    def __init__(self, form: str = "served") -> None:
        self.on_device = form == "served-gpu"
        self._wholes: dict[str, _Whole] = {}
        self._digests: dict[str, str] = {}

    def add(self, name: str, tensor: torch.Tensor) -> None:
        """`tensor` as it was sent, in the dtype that the server keeps."""
        data = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
        rows = -tensor.shape[0] % _VOCAB_MULTIPLE if name.endswith(_EMBEDDINGS) else 0
        for whole, place in _wholes_of(name):
            if whole not in self._wholes:
                self._wholes[whole] = _Whole(_Parts() if self.on_device else _Sha256(), _parts_needed(whole))
            self._wholes[whole].add(place, name, data, rows * (data.numel() // tensor.shape[0]) if rows else 0)

    def flush(self, last: bool = False) -> None:
        """Digest what is complete, and let go of it."""
        waiting = {n: w for n, w in self._wholes.items() if n not in self._digests and w.is_complete(last)}
        kept = {name: whole.sink for name, whole in waiting.items() if isinstance(whole.sink, _Parts)}
        if kept:
            found = tile_hashes([sink.parts for sink in kept.values()])
            self._digests |= dict(zip(kept, found, strict=True))
            for sink in kept.values():
                sink.parts = []
        for name, whole in waiting.items():
            if isinstance(whole.sink, _Sha256):
                self._digests[name] = whole.sink.result()

    def finish(self) -> ServedDigests:
        self.flush(last=True)
        return ServedDigests(self._digests, {name: tuple(self._wholes[name].names) for name in self._digests})


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


def _parts_needed(name: str) -> int | None:
    if name.endswith(_EXPERTS):
        return None
    return next((count for whole, count in _PARTS.items() if f".{whole}." in name), 1)
