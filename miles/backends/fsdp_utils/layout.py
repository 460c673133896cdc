"""How samples lie in one forward pass: packed into a row, or padded to one row each.

Samples of a group start with the same prompt. In a packed row that the attention kernel knows how to read, such a prompt
lies once, and the responses that continue it behind it: what is computed for each token is what it would be alone, and
8 responses to a long prompt cost little more than 8 responses.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class PackedLayout:
    """Segments of a packed row, in order: `lengths[i]` tokens that see themselves causally, and before that the whole
    segment `prefixes[i]`, unless it is None. A prefix is a segment before it without a prefix of its own."""

    lengths: list[int]
    prefixes: list[int | None]

    @classmethod
    def whole(cls, lengths: list[int]) -> PackedLayout:
        """Sequences that share nothing."""
        return cls(lengths, [None] * len(lengths))

    @property
    def shares(self) -> bool:
        return any(prefix is not None for prefix in self.prefixes)


@dataclass(frozen=True)
class ModelInputs:
    """One micro-batch, laid out.

    `input_ids` and `position_ids` are `[1, tokens]` (packed) or `[samples, longest]` (padded on the right, where causal
    attention never looks); `rows` are indices into the flattened positions, one a response token: the position before it.
    """

    input_ids: torch.Tensor
    position_ids: torch.Tensor
    rows: torch.Tensor
    packed: PackedLayout | None


def build_inputs(
    tokens: list[torch.Tensor],
    response_lengths: list[int],
    device: torch.device,
    *,
    packed: bool,
    share_prompts: bool = False,
) -> tuple[ModelInputs, torch.Tensor]:
    """Lay samples out in one row, or one row each.

    Args:
        tokens: int64 `[total_length]` for each sample.
        share_prompts: in a packed row, compute a prompt that several samples start with only once.
    Returns:
        the inputs, and the response tokens `[rows]` in sample order.
    """
    targets = torch.cat([t[len(t) - r :] for t, r in zip(tokens, response_lengths, strict=True)])
    if not packed:
        ids, positions, rows = _padded(tokens, response_lengths)
        layout = None
    else:
        pieces, rows, layout = _packed(tokens, response_lengths, share_prompts)
        ids = torch.cat([piece for piece, _ in pieces]).unsqueeze(0)
        positions = torch.cat([torch.arange(start, start + len(piece)) for piece, start in pieces]).unsqueeze(0)
    return ModelInputs(ids.to(device), positions.to(device), rows.to(device), layout), targets.to(device)


def _padded(tokens: list[torch.Tensor], response_lengths: list[int]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    longest = max(map(len, tokens))
    ids = torch.stack([torch.cat([t, t.new_zeros(longest - len(t))]) for t in tokens])
    positions = torch.arange(longest).expand(len(tokens), -1).contiguous()
    ends = [i * longest + len(t) for i, t in enumerate(tokens)]
    rows = torch.cat([torch.arange(e - r - 1, e - 1) for e, r in zip(ends, response_lengths, strict=True)])
    return ids, positions, rows


def _packed(
    tokens: list[torch.Tensor], response_lengths: list[int], share: bool
) -> tuple[list[tuple[torch.Tensor, int]], torch.Tensor, PackedLayout]:
    """Pieces of the row as (tokens, position of the first), the scored rows, and the layout."""
    pieces: list[tuple[torch.Tensor, int]] = []
    prefixes: list[int | None] = []
    rows, filled = [], 0

    def append(piece: torch.Tensor, start: int, prefix: int | None) -> int:
        """Returns the row of its first token."""
        nonlocal filled
        pieces.append((piece, start))
        prefixes.append(prefix)
        filled += len(piece)
        return filled - len(piece)

    prompts = [t[: len(t) - r] for t, r in zip(tokens, response_lengths, strict=True)]
    keys = [prompt.numpy().tobytes() if share else b"" for prompt in prompts]
    users = Counter(keys)
    placed: dict[bytes, tuple[int, int]] = {}  # prompt -> its segment and the row of its last token
    for sample, prompt, key, length in zip(tokens, prompts, keys, response_lengths, strict=True):
        if not key or users[key] == 1 or length == 0:
            first = append(sample, 0, None)
            rows.append(torch.arange(first + len(prompt) - 1, first + len(sample) - 1))
            continue
        if key not in placed:
            placed[key] = (len(pieces), append(prompt, 0, None) + len(prompt) - 1)
        segment, last = placed[key]
        first = append(sample[len(prompt) :], len(prompt), segment)
        rows.append(torch.cat([torch.tensor([last]), torch.arange(first, first + length - 1)]))
    return pieces, torch.cat(rows), PackedLayout([len(piece) for piece, _ in pieces], prefixes)
