"""The forward pass of Llama- and Qwen-shaped decoders over a paged cache."""

from __future__ import annotations

from typing import Protocol

import torch
import torch.nn.functional as F

from miles.backends.embedded_engine.model_config import ModelConfig
from miles.backends.embedded_engine.moe import moe_forward
from miles.backends.embedded_engine.weights import Experts, Layer, Mlp, Weights


class AttentionPlan(Protocol):
    """Where the batch's keys and values go ([rows, 2 * kv_heads] slots), and how its queries meet the cache."""

    slots: torch.Tensor

    def attend(self, layer: int, q: torch.Tensor) -> torch.Tensor: ...


def rms_norm(x: torch.Tensor, weight: torch.Tensor | None, eps: float) -> torch.Tensor:
    """x / sqrt(mean(x^2) + eps) * weight over the last axis, in fp32; no weight, no scaling."""
    if x.device.type != "cpu":
        return F.rms_norm(x, x.shape[-1:], weight, eps)
    wide = x.float()
    norm = torch.linalg.vector_norm(wide, dim=-1, keepdim=True)
    scale = torch.addcmul(norm.new_full((), eps), norm, norm, value=1.0 / x.shape[-1]).rsqrt_()
    out = (wide * scale).to(x.dtype)
    return out if weight is None else out.mul_(weight)


class RopeTable:
    """cos and sin of every position, [positions, 1, head_dim / 2]."""

    def __init__(self, config: ModelConfig, device: torch.device, dtype: torch.dtype):
        angles = torch.arange(config.context_length, dtype=torch.float64)[:, None] * config.inv_freq
        self.cos = angles.cos().to(device=device, dtype=dtype)[:, None]
        self.sin = angles.sin().to(device=device, dtype=dtype)[:, None]


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, out: torch.Tensor) -> None:
    """Write the rotary embedding of x [rows, heads, dim], pairs being the two halves of dim, to `out`."""
    half = x.shape[-1] // 2
    first, second = x[..., :half], x[..., half:]
    torch.mul(first, cos, out=out[..., :half]).addcmul_(second, sin, value=-1)
    torch.mul(second, cos, out=out[..., half:]).addcmul_(first, sin)


class Model:
    """Weights plus what is derived from the config alone."""

    def __init__(self, config: ModelConfig, weights: Weights):
        self.config, self.weights = config, weights
        self.rope = RopeTable(config, weights.device, weights.dtype)

    def hidden(
        self,
        ids: torch.Tensor,
        positions: torch.Tensor,
        plan: AttentionPlan,
        kv: torch.Tensor,
        routes: list[torch.Tensor] | None = None,
    ) -> torch.Tensor:
        """Final hidden states [rows, hidden] of tokens `ids` [rows] at `positions` [rows].

        Keys and values are written into `kv` (PagePool.kv) at the plan's slots. A `routes` list receives the experts of
        each layer, [rows, top_k].
        """
        eps = self.config.rms_norm_eps
        cos, sin = self.rope.cos.index_select(0, positions), self.rope.sin.index_select(0, positions)
        x = self.weights.embedding.index_select(0, ids)
        for i, layer in enumerate(self.weights.layers):
            attended = self._attention(i, layer, rms_norm(x, layer.input_norm, eps), cos, sin, plan, kv)
            x = layer.output.add_to(x, attended)
            h = rms_norm(x, layer.post_norm, eps)
            if isinstance(layer.mlp, Mlp):
                x = layer.mlp.down.add_to(x, layer.mlp.up.times(layer.mlp.gate.silu(h), h))
            else:
                assert isinstance(layer.mlp, Experts) and self.config.moe is not None
                x = x + moe_forward(layer.mlp, self.config.moe, h, routes)
        return rms_norm(x, self.weights.final_norm, eps)

    def _attention(
        self,
        i: int,
        layer: Layer,
        h: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
        plan: AttentionPlan,
        kv: torch.Tensor,
    ) -> torch.Tensor:
        c = self.config
        heads = layer.qkv(h).view(-1, c.num_heads + 2 * c.num_kv_heads, c.head_dim)
        rotated = torch.empty_like(heads)
        turning = c.num_heads + c.num_kv_heads
        qk = heads[:, :turning]
        if layer.q_norm is not None and layer.k_norm is not None:
            qk = rms_norm(qk, None, c.rms_norm_eps)
            qk[:, : c.num_heads].mul_(layer.q_norm)
            qk[:, c.num_heads :].mul_(layer.k_norm)
        rotate(qk, cos, sin, rotated[:, :turning])
        rotated[:, turning:].copy_(heads[:, turning:])
        kv[i].view(-1, c.head_dim).index_put_((plan.slots,), rotated[:, c.num_heads :])
        return plan.attend(i, rotated[:, : c.num_heads])

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[rows, hidden] -> [rows, vocab] fp32."""
        return self.weights.lm_head(hidden).float()
