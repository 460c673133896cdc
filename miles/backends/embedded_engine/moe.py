"""Sparse layers: each token through its top-k experts."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from miles.backends.embedded_engine.linear import ROW_STEP
from miles.backends.embedded_engine.model_config import MoeConfig
from miles.backends.embedded_engine.weights import Experts


def moe_forward(layer: Experts, config: MoeConfig, h: torch.Tensor, routes: list[torch.Tensor] | None) -> torch.Tensor:
    """h [rows, hidden] -> [rows, hidden]; appends the chosen experts [rows, top_k] to `routes`.

    A token's outputs are summed in the order of its own choices, so the sum does not depend on the batch.
    """
    probs = torch.softmax(layer.router(h).float(), dim=-1)
    weight, chosen = torch.topk(probs, config.top_k, dim=-1)
    if config.norm_topk_prob:
        weight = weight / weight.sum(dim=-1, keepdim=True)
    if routes is not None:
        routes.append(chosen)
    by_choice = torch.empty(h.shape[0] * config.top_k, h.shape[1], dtype=h.dtype, device=h.device)
    order = torch.argsort(chosen.reshape(-1), stable=True)
    counts = torch.bincount(chosen.reshape(-1), minlength=config.num_experts).tolist()
    start = 0
    for expert, count in zip(layer.experts, counts, strict=True):
        if count == 0:
            continue
        where = order[start : start + count]
        rows = h.index_select(0, where // config.top_k)
        if padding := -count % ROW_STEP:
            rows = F.pad(rows, (0, 0, 0, padding))
        out = expert.down(expert.up.times(expert.gate.silu(rows), rows))
        by_choice.index_copy_(0, where, out[:count])
        start += count
    by_choice = by_choice.view(h.shape[0], config.top_k, -1)
    total = by_choice[:, 0] * weight[:, :1].to(h.dtype)
    for k in range(1, config.top_k):
        total.addcmul_(by_choice[:, k], weight[:, k : k + 1].to(h.dtype))
    return total
