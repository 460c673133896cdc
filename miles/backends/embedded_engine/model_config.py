"""The facts of a Hugging Face model directory that the forward pass needs, read from its `config.json`."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from miles.backends.training_utils.replay.expert_layout import ExpertLayout

ARCHITECTURES = {
    "LlamaForCausalLM": "llama",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
    "Qwen3MoeForCausalLM": "qwen3_moe",
}


class ModelError(ValueError):
    """A model directory that the engine cannot serve; the message lists every reason."""


@dataclass(frozen=True)
class MoeConfig:
    """Experts of the sparse layers. `sparse_layers` are the layer indices that have them."""

    num_experts: int
    top_k: int
    intermediate_size: int
    norm_topk_prob: bool
    sparse_layers: frozenset[int]


@dataclass(frozen=True)
class ModelConfig:
    """Architecture of one causal LM. Sizes in elements, `inv_freq` is [head_dim / 2] in fp64."""

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    context_length: int
    tied_embeddings: bool
    qkv_bias: bool
    output_bias: bool
    mlp_bias: bool
    qk_norm: bool
    dtype: torch.dtype
    inv_freq: torch.Tensor = field(repr=False, compare=False)
    moe: MoeConfig | None = None
    eos_token_ids: tuple[int, ...] = ()

    @property
    def group_size(self) -> int:
        """Query heads that share one key/value head."""
        return self.num_heads // self.num_kv_heads


def load_model_config(model_path: str | Path) -> ModelConfig:
    """Read and check `config.json` (and the stop ids of `generation_config.json`).

    Raises: ModelError with everything that the engine does not support, all at once.
    """
    path = Path(model_path)
    if not path.is_dir():
        raise ModelError(f"--model-path {path} is not a directory: give a Hugging Face model directory")
    raw = _read_json(path / "config.json", required=True)
    problems = _unsupported(raw)
    if problems:
        raise ModelError(f"{path}/config.json cannot be served by the embedded engine: " + "; ".join(problems))
    kind = ARCHITECTURES[raw["architectures"][0]]
    heads, hidden = raw["num_attention_heads"], raw["hidden_size"]
    head_dim = raw.get("head_dim") or hidden // heads
    return ModelConfig(
        architecture=kind,
        vocab_size=raw["vocab_size"],
        hidden_size=hidden,
        intermediate_size=raw["intermediate_size"],
        num_layers=raw["num_hidden_layers"],
        num_heads=heads,
        num_kv_heads=raw.get("num_key_value_heads") or heads,
        head_dim=head_dim,
        rms_norm_eps=raw.get("rms_norm_eps", 1e-6),
        context_length=raw.get("max_position_embeddings", 2048),
        tied_embeddings=bool(raw.get("tie_word_embeddings", False)),
        qkv_bias=True if kind == "qwen2" else bool(raw.get("attention_bias", False)),
        output_bias=kind != "qwen2" and bool(raw.get("attention_bias", False)),
        mlp_bias=kind == "llama" and bool(raw.get("mlp_bias", False)),
        qk_norm=kind in ("qwen3", "qwen3_moe"),
        dtype=_dtype(raw),
        inv_freq=rope_frequencies(_rope(raw), head_dim),
        moe=_moe(raw) if kind == "qwen3_moe" else None,
        eos_token_ids=_eos_ids(raw, _read_json(path / "generation_config.json", required=False)),
    )


def _read_json(path: Path, *, required: bool) -> dict[str, Any]:
    if not path.is_file():
        if required:
            raise ModelError(f"{path} is missing: this is not a Hugging Face model directory")
        return {}
    try:
        return json.loads(path.read_text())
    except json.JSONDecodeError as error:
        raise ModelError(f"{path} is not valid JSON: {error}") from None


def _rope(raw: dict[str, Any]) -> dict[str, Any]:
    """Rotary settings in one shape, from either spelling of `config.json` (`rope_parameters`, or theta and scaling)."""
    rope = dict(raw.get("rope_parameters") or raw.get("rope_scaling") or {})
    rope.setdefault("rope_type", rope.get("type", "default"))
    rope.setdefault("rope_theta", raw.get("rope_theta", 10000.0))
    return rope


def _unsupported(raw: dict[str, Any]) -> list[str]:
    problems = []
    names = raw.get("architectures") or []
    if len(names) != 1 or names[0] not in ARCHITECTURES:
        problems.append(f"architectures {names} (supported: {', '.join(ARCHITECTURES)})")
    missing = [
        k
        for k in ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
        if k not in raw
    ]
    if missing:
        problems.append(f"missing keys {missing}")
    if raw.get("hidden_act", "silu") != "silu":
        problems.append(f"hidden_act {raw['hidden_act']!r} (only silu)")
    sliding = raw.get("use_sliding_window") or any(t != "full_attention" for t in raw.get("layer_types") or [])
    if sliding:
        problems.append("sliding-window attention (use_sliding_window / layer_types); serve it with SGLang")
    if raw.get("quantization_config"):
        problems.append("quantized weights (quantization_config); give a plain checkpoint")
    if _rope(raw)["rope_type"] not in ("default", "linear", "llama3"):
        problems.append(f"rope type {_rope(raw)['rope_type']!r} (only default, linear, llama3)")
    if raw.get("partial_rotary_factor", _rope(raw).get("partial_rotary_factor", 1.0)) != 1.0:
        problems.append("partial_rotary_factor other than 1")
    return problems


def rope_frequencies(rope: dict[str, Any], head_dim: int) -> torch.Tensor:
    """Angular frequency of each rotary pair, [head_dim / 2] fp64, with `linear` or `llama3` scaling applied."""
    exponent = torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim
    frequencies = 1.0 / (float(rope["rope_theta"]) ** exponent)
    if rope["rope_type"] == "linear":
        return frequencies / rope["factor"]
    if rope["rope_type"] != "llama3":
        return frequencies
    # Long wavelengths are slowed by `factor`, short ones kept, those between interpolated.
    original = rope["original_max_position_embeddings"]
    low, high = rope["low_freq_factor"], rope["high_freq_factor"]
    wavelength = 2 * math.pi / frequencies
    smooth = ((original / wavelength - low) / (high - low)).clamp(0.0, 1.0)
    return (1 - smooth) * frequencies / rope["factor"] + smooth * frequencies


def _dtype(raw: dict[str, Any]) -> torch.dtype:
    name = raw.get("dtype") or raw.get("torch_dtype") or "float32"
    dtype = getattr(torch, str(name).removeprefix("torch."), None)
    if dtype not in (torch.float32, torch.bfloat16, torch.float16):
        raise ModelError(f"config.json: dtype {name!r} is not float32, bfloat16 or float16")
    return dtype


def _moe(raw: dict[str, Any]) -> MoeConfig | None:
    experts = ExpertLayout.from_config(raw)
    if experts is None:
        return None
    return MoeConfig(
        num_experts=experts.num_experts,
        top_k=experts.topk,
        intermediate_size=raw["moe_intermediate_size"],
        norm_topk_prob=bool(raw.get("norm_topk_prob", False)),
        sparse_layers=frozenset(experts.moe_layers),
    )


def _eos_ids(*sources: dict[str, Any]) -> tuple[int, ...]:
    ids: set[int] = set()
    for source in sources:
        value = source.get("eos_token_id")
        if value is not None:
            ids.update([value] if isinstance(value, int) else value)
    return tuple(sorted(ids))
