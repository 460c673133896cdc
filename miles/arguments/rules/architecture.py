"""Architecture flags, as Megatron launchers pass them, against the Hugging Face config, which decides."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from miles.arguments.args import FLAGS, Args
from miles.arguments.rules.rule import RuleSet

Config = dict[str, Any]


def _keys(*names: str) -> Callable[[Config], Any]:
    """The first of these config entries that is there; None where none is."""
    return lambda c: next((c[n] for n in names if c.get(n) is not None), None)


def _head_dim(c: Config) -> Any:
    if c.get("head_dim") is not None:
        return c["head_dim"]
    hidden, heads = c.get("hidden_size"), c.get("num_attention_heads")
    return hidden // heads if hidden and heads else None


def _rope(name: str) -> Callable[[Config], Any]:
    def read(c: Config) -> Any:
        nested = c.get("rope_parameters") or c.get("rope_scaling") or {}
        return c.get(name, nested.get(name) if isinstance(nested, dict) else None)

    return read


def _untied(c: Config) -> Any:
    tied = c.get("tie_word_embeddings")
    return None if tied is None else not tied


def _grouped(c: Config) -> Any:
    heads, groups = c.get("num_attention_heads"), c.get("num_key_value_heads")
    return None if heads is None or groups is None else groups < heads


def _gated(c: Config) -> Any:
    activation = c.get("hidden_act")
    return None if activation is None else activation == "silu"


# Flag -> what the config says; None where it says nothing.
CONFIG: dict[str, Callable[[Config], Any]] = {
    "num_layers": _keys("num_hidden_layers"),
    "hidden_size": _keys("hidden_size"),
    "ffn_hidden_size": _keys("intermediate_size"),
    "num_attention_heads": _keys("num_attention_heads"),
    "num_query_groups": _keys("num_key_value_heads"),
    "group_query_attention": _grouped,
    "kv_channels": _head_dim,
    "vocab_size": _keys("vocab_size"),
    "norm_epsilon": _keys("rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon"),
    "rotary_base": _rope("rope_theta"),
    "rotary_percent": _rope("partial_rotary_factor"),
    "untie_embeddings_and_output_weights": _untied,
    "swiglu": _gated,
    "attention_dropout": _keys("attention_dropout"),
    "q_lora_rank": _keys("q_lora_rank"),
    "kv_lora_rank": _keys("kv_lora_rank"),
    "qk_head_dim": _keys("qk_nope_head_dim"),
    "qk_pos_emb_head_dim": _keys("qk_rope_head_dim"),
    "v_head_dim": _keys("v_head_dim"),
    "num_experts": _keys("num_experts", "n_routed_experts", "num_local_experts"),
    "moe_ffn_hidden_size": _keys("moe_intermediate_size"),
    "moe_router_topk": _keys("num_experts_per_tok"),
    "moe_router_num_groups": _keys("n_group"),
    "moe_router_group_topk": _keys("topk_group"),
    "moe_router_topk_scaling_factor": _keys("routed_scaling_factor"),
    "moe_router_score_function": _keys("scoring_func"),
}


def read_config(directory: str | None) -> Config:
    """config.json of a model directory, of its text part for a multimodal model; empty where there is none."""
    file = Path(directory or "") / "config.json"
    if not directory or not file.is_file():
        return {}
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except ValueError:
        return {}  # the rule on model directories reports a broken file
    if not isinstance(config, dict):
        return {}
    return config | (config.get("text_config") or {})


def differences(args: Args) -> Iterator[str]:
    """One message that lists every given flag that contradicts the config."""
    given = [name for name in CONFIG if name in args.given and getattr(args, name) is not None]
    config = read_config(args.hf_checkpoint) if given else {}
    wrong = []
    for name in given:
        value, actual = getattr(args, name), CONFIG[name](config)
        if actual is not None and not _equal(value, actual):
            wrong.append(f"{FLAGS[name].option} {value} (config: {actual})")
    if wrong:
        yield f"architecture flags that contradict {args.hf_checkpoint}/config.json: {', '.join(wrong)}. Drop or correct them"


def _equal(value: Any, actual: Any) -> bool:
    if isinstance(value, float) or isinstance(actual, float):
        return abs(float(value) - float(actual)) <= 1e-9 * max(1.0, abs(float(actual)))
    return value == actual


RULES = (RuleSet("architecture", differences),)
