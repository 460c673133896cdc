"""What the model's layers are built from: Transformer Engine's modules where it is installed, megatron-core's local ones otherwise."""

from __future__ import annotations

import importlib
from typing import Any

from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.transformer import multi_latent_attention
from megatron.core.transformer.mlp import MLP
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules

from miles.backends.megatron_utils.core_attention import CoreAttention
from miles.backends.megatron_utils.norm import norm_class


def block_spec(args: Any, config: Any, *, transformer_engine: bool, vp_stage: int | None) -> Any:
    """The spec of this rank's layers of a virtual stage, or what `--spec MODULE FUNCTION` returns.

    `--transformer-impl local` keeps the local layers although Transformer Engine is there.
    """
    custom = getattr(args, "spec", None)
    if custom:
        module, function = custom
        return getattr(importlib.import_module(module), function)(args, config, vp_stage)
    engine = transformer_engine and getattr(args, "transformer_impl", "transformer_engine") == "transformer_engine"
    spec = get_gpt_decoder_block_spec(
        config, use_transformer_engine=engine, normalization=config.normalization, vp_stage=vp_stage
    )
    return spec if engine else _with_own_modules(spec, config)


def _with_own_modules(spec: TransformerBlockSubmodules, config: Any) -> TransformerBlockSubmodules:
    """The local layers with an attention that packs rows and norms that allow sequence parallelism."""
    if config.multi_latent_attention:
        # Without Transformer Engine its classes are mocks there, and the flag still says that it is installed (0.16.1).
        multi_latent_attention.HAVE_TE = isinstance(multi_latent_attention.TELinear, type)
    norm = norm_class(config)
    for layer in spec.layer_specs:
        layer.submodules.input_layernorm = layer.submodules.pre_mlp_layernorm = norm
        attention = layer.submodules.self_attention.submodules
        attention.core_attention = CoreAttention
        if config.qk_layernorm:
            for name in ("q_layernorm", "k_layernorm", "kv_layernorm"):
                if hasattr(attention, name):
                    setattr(attention, name, norm)
        layer.submodules.sharded_state_dict_keys_map = _checkpoint_names(layer.submodules, config)
    spec.layer_norm = norm
    return spec


def _checkpoint_names(layer: Any, config: Any) -> dict[str, str]:
    """Transformer Engine's names of the tensors that it fuses, so that checkpoints go from one kind of layers to the other.

    megatron-core has such a table for layers without experts and latent attention only.
    """
    names = {}
    if config.multi_latent_attention:
        names["self_attention.kv_layernorm."] = "self_attention.linear_kv_up_proj.layer_norm_"
        if config.q_lora_rank is not None:
            names["self_attention.q_layernorm."] = "self_attention.linear_q_up_proj.layer_norm_"
    else:
        names["input_layernorm."] = "self_attention.linear_qkv.layer_norm_"
    if _is_dense(layer.mlp):
        names["pre_mlp_layernorm."] = "mlp.linear_fc1.layer_norm_"
    return names


def _is_dense(mlp: Any) -> bool:
    """Whether a layer's MLP has no experts: a spec names its class; from megatron-core 0.19 on it is a partial of its maker."""
    return mlp.module is MLP if hasattr(mlp, "module") else getattr(mlp.func, "__self__", None) is MLP
