"""The module that FSDP wraps: a Hugging Face causal LM whose head runs on chosen rows only.

Going through the model's own `forward` would compute `[tokens, vocab]` logits for prompt tokens too. Here the
backbone runs on all tokens and a callback gets hidden states of the rows that are scored, and the head.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from miles.backends.fsdp_utils.layout import ModelInputs, PackedLayout

# (hidden [rows, hidden] or None, head, logits [rows, vocab] or None) -> tensors; exactly one of hidden, logits is given.
HeadFunction = Callable[[torch.Tensor | None, nn.Module, torch.Tensor | None], Any]


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

    def _borders(self, layout: PackedLayout | None, device: torch.device) -> dict[str, Any]:
        if layout is None or self.borders == "none":
            return {}
        if self.borders == "packed":
            return {"packed_layout": layout}
        ends = torch.tensor([0, *layout.lengths], device=device).cumsum(0).to(torch.int32)
        longest = max(layout.lengths)
        return {"cu_seq_lens_q": ends, "cu_seq_lens_k": ends, "max_length_q": longest, "max_length_k": longest}

    def forward(self, inputs: ModelInputs, head_function: HeadFunction) -> Any:
        borders = self._borders(inputs.packed, inputs.input_ids.device)
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
        inputs = ModelInputs(ids, ids.clone(), torch.arange(2, device=device), PackedLayout.whole([2]))

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
