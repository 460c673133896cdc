"""The forward pass of Llama- and Qwen-shaped decoders over a paged cache."""

from __future__ import annotations

from typing import Protocol

import torch

from miles.backends.embedded_engine.model_config import ModelConfig
from miles.backends.embedded_engine.moe import moe_forward
from miles.backends.embedded_engine.weights import Experts, Mlp, Weights


class AttentionPlan(Protocol):
    """Where the batch's keys and values go ([rows, 2 * kv_heads] slots), and how its queries meet the cache."""

    slots: torch.Tensor

    def attend(self, layer: int, q: torch.Tensor) -> torch.Tensor: ...


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: torch.Tensor) -> torch.Tensor:
    """x / sqrt(mean(x^2) + eps) * weight over the last axis, in fp32; weight [..., dim] broadcasts against x."""
    wide = x if x.dtype == torch.float32 else x.float()
    norm = torch.linalg.vector_norm(wide, dim=-1, keepdim=True)
    scale = torch.addcmul(eps, norm, norm, value=1.0 / x.shape[-1]).rsqrt_()
    out = wide * scale
    return (out if out.dtype == x.dtype else out.to(x.dtype)).mul_(weight)


class RopeTable:
    """cos and sin of every position, [positions, 1, head_dim]; sin is negative where `rotate` subtracts."""

    def __init__(self, config: ModelConfig, device: torch.device, dtype: torch.dtype):
        angles = torch.arange(config.context_length, dtype=torch.float64)[:, None] * config.inv_freq
        cos, sin = angles.cos(), angles.sin()
        self.cos = torch.cat([cos, cos], dim=1).to(device=device, dtype=dtype)[:, None]
        self.sin = torch.cat([-sin, sin], dim=1).to(device=device, dtype=dtype)[:, None]


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, out: torch.Tensor) -> None:
    """Write the rotary embedding of x [rows, heads, dim], pairs being the two halves of dim, to `out`."""
    torch.mul(x, cos, out=out).addcmul_(x.roll(x.shape[-1] // 2, -1), sin)


class Model:
    """Weights plus what is derived from the config alone."""

    def __init__(self, config: ModelConfig, weights: Weights):
        self.config, self.weights = config, weights
        self.rope = RopeTable(config, weights.device, weights.dtype)
        self._eps = torch.tensor(config.rms_norm_eps, device=weights.device)
        self._qk_norms: list[torch.Tensor] = []
        self._qk_norms_epoch = -1

    def hidden(
        self,
        ids: torch.Tensor,
        positions: torch.Tensor,
        plan: AttentionPlan,
        kv: torch.Tensor,
        routes: list[torch.Tensor] | None = None,
        keep: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Final hidden states [rows, hidden] of tokens `ids` [rows] at `positions` [rows].

        Keys and values are written into `kv` (PagePool.kv) at the plan's slots. A `routes` list receives the experts of
        each layer, [rows, top_k]. With `keep` [kept] only those rows are computed to the end and returned: the others
        have done their work once the last layer's keys and values are written.
        """
        eps = self._eps
        qk_norms = self._current_qk_norms()
        cos, sin = self.rope.cos.index_select(0, positions), self.rope.sin.index_select(0, positions)
        x = self.weights.embedding.index_select(0, ids)
        for i, layer in enumerate(self.weights.layers):
            h = rms_norm(x, layer.input_norm, eps)
            attended = self._attention(i, layer.qkv(h), qk_norms, cos, sin, plan, kv)
            if keep is not None and i == self.config.num_layers - 1:
                x, attended = x.index_select(0, keep), attended.index_select(0, keep)
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
        qkv: torch.Tensor,
        qk_norms: list[torch.Tensor],
        cos: torch.Tensor,
        sin: torch.Tensor,
        plan: AttentionPlan,
        kv: torch.Tensor,
    ) -> torch.Tensor:
        c = self.config
        turning = c.num_heads + c.num_kv_heads  # queries and keys are rotated, values are not
        heads = qkv.view(-1, turning + c.num_kv_heads, c.head_dim)
        rotated = torch.empty_like(heads)
        qk = heads[:, :turning]
        if qk_norms:
            qk = rms_norm(qk, qk_norms[i], self._eps)
        rotate(qk, cos, sin, rotated[:, :turning])
        rotated[:, turning:].copy_(heads[:, turning:])
        kv[i].view(-1, c.head_dim).index_put_((plan.slots,), rotated[:, c.num_heads :])
        return plan.attend(i, rotated[:, : c.num_heads])

    def _current_qk_norms(self) -> list[torch.Tensor]:
        """Each layer's query and key norm weights, a row a head: [heads + kv_heads, head_dim]. Renewed with the weights."""
        c, weights = self.config, self.weights
        if c.qk_norm and self._qk_norms_epoch != weights.epoch:
            self._qk_norms = [
                torch.cat([layer.q_norm.expand(c.num_heads, -1), layer.k_norm.expand(c.num_kv_heads, -1)])
                for layer in weights.layers
                if layer.q_norm is not None and layer.k_norm is not None
            ]
            self._qk_norms_epoch = weights.epoch
        return self._qk_norms

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[rows, hidden] -> [rows, vocab] fp32."""
        return self.weights.lm_head(hidden).float()
