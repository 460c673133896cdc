"""The digest that SGLang's checker computes on a GPU, computed from the bytes on whatever device they are.

Source: `sglang.kernels.ops.memory.gpu_tensor_hash` of 0.5.16 to 0.5.21. The bytes are read as little-endian 32-bit words. Each
word is mixed with its position into two 32-bit numbers, which are summed over tiles of 8192 words; a tile's two sums,
mixed again, make one 64-bit number, and those are summed over the tensor. All sums wrap around, so their order is free.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

TILE_WORDS = 8192
_TILE_BYTES = 4 * TILE_WORDS
_SEED = 0x243F6A88
_SEEDS = (_SEED, ((_SEED * 0x9E3779B1) ^ 0xDEADBEEF) & 0xFFFFFFFF)
_POSITION = ((0x27D4EB2D, 15), (0x165667B1, 13))  # factor and rotation for each of the two numbers
_MIX = (0x85EBCA6B, 0xC2B2AE35)
_CHUNK_TILES = 4096  # 128 MiB of words at a time: the arithmetic needs several times that
_MASK64 = (1 << 64) - 1


@torch.no_grad()
def tile_hashes(tensors: Sequence[Sequence[torch.Tensor]]) -> list[str]:
    """16 hex digits for each tensor, which is given as its parts: uint8 `[nbytes]`, one after the other, on one device.

    What is left of a last word counts as zeros. All tensors are computed together: a model has hundreds of small ones.
    """
    tiles, owners, counts = _lay_out(tensors)
    device = tiles.device
    owner = torch.tensor(owners, device=device)
    words = torch.tensor(counts, device=device)
    first = torch.cat([torch.arange(-(-count // TILE_WORDS), device=device) for count in counts])
    base, total = (first * TILE_WORDS).to(torch.int32), words[owner].to(torch.int32)
    halves = []
    for start in range(0, len(owners), _CHUNK_TILES):
        part = slice(start, start + _CHUNK_TILES)
        halves.append(_tile_sums(tiles[part], base[part], total[part]))
    sums = torch.zeros(2, len(counts), dtype=torch.int64, device=device)
    sums.index_add_(1, owner, torch.cat(halves, dim=1))
    high, low = sums.tolist()
    finished = (_finish(((upper << 32) + lower) & _MASK64) for upper, lower in zip(high, low, strict=True))
    return [f"{value if count else 0:016x}" for value, count in zip(finished, counts, strict=True)]


def _lay_out(tensors: Sequence[Sequence[torch.Tensor]]) -> tuple[torch.Tensor, list[int], list[int]]:
    """All words, each tensor from a new tile on: `[tiles, TILE_WORDS]`; each tile's tensor; each tensor's number of words."""
    sizes = [sum(part.numel() for part in parts) for parts in tensors]
    filled = [-(-size // _TILE_BYTES) for size in sizes]
    data = torch.zeros(sum(filled) * _TILE_BYTES, dtype=torch.uint8, device=tensors[0][0].device)
    start = 0
    for parts, tiles in zip(tensors, filled, strict=True):
        at = start
        for part in parts:
            data[at : at + part.numel()].copy_(part)
            at += part.numel()
        start += tiles * _TILE_BYTES
    owners = [i for i, tiles in enumerate(filled) for _ in range(tiles)]
    return data.view(torch.int32).view(-1, TILE_WORDS), owners, [-(-size // 4) for size in sizes]


def _tile_sums(words: torch.Tensor, base: torch.Tensor, total: torch.Tensor) -> torch.Tensor:
    """The upper and the lower half of each tile's number, int64 `[2, tiles]`.

    words: `[tiles, TILE_WORDS]`. base, total: `[tiles]`, where a tile begins in its tensor, and the tensor's words.
    """
    index = base[:, None] + torch.arange(TILE_WORDS, dtype=torch.int32, device=words.device)
    inside = index < total[:, None]
    out = []
    for (factor, rotation), seed in zip(_POSITION, _SEEDS, strict=True):
        position = (index * _signed(factor) + _signed(seed)) ^ _rotate(index, rotation)
        mixed = _mix(words ^ position) * inside
        sums = mixed.sum(1, dtype=torch.int64).to(torch.int32)  # keeps the low 32 bits
        out.append(_mix(sums ^ (total * 4)).to(torch.int64) & 0xFFFFFFFF)
    return torch.stack(out)


def _signed(value: int) -> int:
    """The int32 with the bits of an unsigned 32-bit number."""
    return value - (1 << 32) if value >= 1 << 31 else value


def _shift(x: torch.Tensor, bits: int) -> torch.Tensor:
    """Right, with zeros from the left."""
    return (x >> bits) & ((1 << (32 - bits)) - 1)


def _rotate(x: torch.Tensor, bits: int) -> torch.Tensor:
    return (x << bits) | _shift(x, 32 - bits)


def _mix(x: torch.Tensor) -> torch.Tensor:
    x = (x ^ _shift(x, 16)) * _signed(_MIX[0])
    x = (x ^ _shift(x, 13)) * _signed(_MIX[1])
    return x ^ _shift(x, 16)


def _finish(x: int) -> int:
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 & _MASK64
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB & _MASK64
    return x ^ (x >> 31)
