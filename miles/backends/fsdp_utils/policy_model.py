"""The module that FSDP wraps: a Hugging Face causal LM whose head runs on chosen rows only.

Going through the model's own `forward` would compute `[tokens, vocab]` logits for prompt tokens too. Here the
backbone runs on all tokens and a callback gets hidden states of the rows that are scored, and the head.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

# (hidden [rows, hidden] or None, head, logits [rows, vocab] or None) -> tensors; exactly one of hidden, logits is given.
HeadFunction = Callable[[torch.Tensor | None, nn.Module, torch.Tensor | None], Any]


@dataclass(frozen=True)
class ModelInputs:
    """One micro-batch, laid out.

    `input_ids` and `position_ids` are `[1, tokens]` (packed) or `[samples, longest]` (padded on the right, where causal
    attention never looks); `rows` are indices into the flattened positions, one a response token: the position before it.
    """

    input_ids: torch.Tensor
    position_ids: torch.Tensor
    rows: torch.Tensor
    packed_lengths: list[int] | None


class PolicyModel(nn.Module):
    """`forward(inputs, head_function)` returns what `head_function` makes of the scored rows."""

    def __init__(self, hf: Any, *, borders: str) -> None:
        super().__init__()
        self.hf: Any = hf  # a transformers PreTrainedModel
        self.borders = borders  # packed | flash | none: how sequence borders reach attention
        self.plain_head = True  # logits are `head(hidden)` and nothing more

    @property
    def head(self) -> nn.Module:
        return self.hf.get_output_embeddings()

    def _borders(self, lengths: list[int] | None, device: torch.device) -> dict[str, Any]:
        if lengths is None or self.borders == "none":
            return {}
        if self.borders == "packed":
            return {"packed_lengths": lengths}
        ends = torch.tensor([0, *lengths], device=device).cumsum(0).to(torch.int32)
        longest = max(lengths)
        return {"cu_seq_lens_q": ends, "cu_seq_lens_k": ends, "max_length_q": longest, "max_length_k": longest}

    def forward(self, inputs: ModelInputs, head_function: HeadFunction) -> Any:
        borders = self._borders(inputs.packed_lengths, inputs.input_ids.device)
        common = {"input_ids": inputs.input_ids, "position_ids": inputs.position_ids, "use_cache": False, **borders}
        if self.plain_head:
            hidden = self.hf.base_model(**common).last_hidden_state
            return head_function(hidden.flatten(0, 1).index_select(0, inputs.rows), self.head, None)
        logits = self.hf(**common).logits.flatten(0, 1).index_select(0, inputs.rows)
        return head_function(None, self.head, logits)

    @torch.no_grad()
    def find_out_head(self, device: torch.device) -> None:
        """Compare the model's own logits with `head(hidden)` once, and remember whether they are the same. Collective."""
        ids = torch.arange(2, device=device).unsqueeze(0)
        inputs = ModelInputs(ids, ids.clone(), torch.arange(2, device=device), [2])

        def logits_of(hidden: torch.Tensor | None, head: nn.Module, logits: torch.Tensor | None) -> torch.Tensor:
            return (head(hidden) if logits is None else logits).float()

        if self.hf.base_model is self.hf:  # no backbone to call without the head
            self.plain_head = False
            return
        self.plain_head = True
        plain = self(inputs, logits_of)
        self.plain_head = False
        own = self(inputs, logits_of)
        scale = own.abs().max().clamp_min(1e-6)
        self.plain_head = bool((plain - own).abs().max() <= 2e-2 * scale)


def build_inputs(
    tokens: list[torch.Tensor], response_lengths: list[int], device: torch.device, *, packed: bool
) -> tuple[ModelInputs, torch.Tensor]:
    """Lay samples out in one row, or one row each.

    Args:
        tokens: int64 `[total_length]` for each sample.
    Returns:
        the inputs, and the response tokens `[rows]` in sample order.
    """
    lengths = [len(t) for t in tokens]
    if packed:
        starts = [0]
        for n in lengths[:-1]:
            starts.append(starts[-1] + n)
        ids = torch.cat(tokens).unsqueeze(0)
        positions = torch.cat([torch.arange(n) for n in lengths]).unsqueeze(0)
    else:
        longest = max(lengths)
        starts = [i * longest for i in range(len(lengths))]
        ids = torch.stack([torch.cat([t, t.new_zeros(longest - len(t))]) for t in tokens])
        positions = torch.arange(longest).expand(len(lengths), -1).contiguous()
    spans = list(zip(starts, lengths, response_lengths, strict=True))
    rows = torch.cat([torch.arange(s + n - r - 1, s + n - 1) for s, n, r in spans])
    targets = torch.cat([t[len(t) - r :] for t, r in zip(tokens, response_lengths, strict=True)])
    inputs = ModelInputs(ids.to(device), positions.to(device), rows.to(device), lengths if packed else None)
    return inputs, targets.to(device)
