"""Forward FLOPs of one sequence, for `--balance-by-flops`: linear layers grow with length, attention with its square."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class ModelDims:
    """The sizes of a decoder that its FLOPs depend on. `ffn_active` is the feed-forward width that one token uses."""

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn_active: int
    vocab: int

    @classmethod
    def from_hf_directory(cls, directory: str | Path) -> ModelDims:
        """Read `config.json`. Raises ValueError naming every size that is missing."""
        path = Path(directory) / "config.json"
        try:
            config: dict[str, Any] = json.loads(path.read_text())
        except (OSError, json.JSONDecodeError) as error:
            raise ValueError(f"--balance-by-flops reads the model's sizes from {path}: {error}") from error
        config = config.get("text_config", config)
        needed = ("hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size")
        missing = [name for name in needed if name not in config]
        if missing:
            raise ValueError(f"--balance-by-flops needs {', '.join(missing)} in {path}")
        hidden, heads = config["hidden_size"], config["num_attention_heads"]
        experts = config.get("num_experts_per_tok") or 0
        ffn = config.get("moe_intermediate_size", 0) * experts if experts else 0
        return cls(
            hidden=hidden,
            layers=config["num_hidden_layers"],
            heads=heads,
            kv_heads=config.get("num_key_value_heads") or heads,
            head_dim=config.get("head_dim") or hidden // heads,
            ffn_active=ffn or config.get("intermediate_size") or 4 * hidden,
            vocab=config["vocab_size"],
        )


def sequence_flops(length: int, dims: ModelDims) -> float:
    """Multiply-adds times two of one causal forward pass over `length` tokens."""
    attention_width = dims.heads * dims.head_dim
    projections = dims.hidden * (2 * attention_width + 2 * dims.kv_heads * dims.head_dim)
    linear = dims.layers * (projections + 3 * dims.hidden * dims.ffn_active) + dims.hidden * dims.vocab
    attention = dims.layers * attention_width * length  # scores and values, each half of the square
    return 2.0 * length * (linear + attention)
