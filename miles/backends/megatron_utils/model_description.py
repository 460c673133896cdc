"""The model to build: a Hugging Face config, flags and the machine become megatron-core's `TransformerConfig`."""

from __future__ import annotations

import dataclasses
import logging
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.transformer import MLATransformerConfig, TransformerConfig

from miles.backends.megatron_utils.families.family import Family
from miles.backends.megatron_utils.families.registry import family_of
from miles.backends.megatron_utils.platform import Platform
from miles.backends.megatron_utils.rope import Rope, read_rope

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class ModelDescription:
    """`vocab_size` counts the model's tokens; the embedding has `padded_vocab_size` rows, of which the rest are zero."""

    family: Family
    hf_config: Any
    config: TransformerConfig
    rope: Rope
    vocab_size: int
    padded_vocab_size: int
    tied: bool


def describe_model(args: Any, directory: str | Path, platform: Platform, dtype: torch.dtype) -> ModelDescription:
    """Read the config of `directory` for the parallel layout that megatron-core was initialised with.

    Args:
        dtype: of parameters and activations.
    Raises: UnsupportedModelError, naming what the trainer has instead.
    """
    import transformers

    hf = transformers.AutoConfig.from_pretrained(
        directory, trust_remote_code=bool(getattr(args, "trust_remote_code", False))
    )
    hf = hf.get_text_config()
    family, rope = family_of(hf, getattr(args, "model_name", None)), read_rope(hf)
    fields = family.fields(hf) | _flag_fields(args) | _parallel_fields(args) | platform.config_overrides
    if rope.attention_factor != 1.0 and not fields.get("multi_latent_attention"):
        fields["softmax_scale"] = rope.attention_factor**2 / math.sqrt(fields["kv_channels"])
    if fields.get("multi_latent_attention") and fields["rope_type"] != "yarn":
        fields["apply_rope_fusion"] = False  # megatron-core fuses YaRN's only
    fields |= {
        "params_dtype": dtype,
        "pipeline_dtype": dtype,
        "bf16": dtype == torch.bfloat16,
        "fp16": dtype == torch.float16,
    }
    kind = MLATransformerConfig if fields.get("multi_latent_attention") else TransformerConfig
    known = {f.name for f in dataclasses.fields(kind)}
    config = kind(**{name: value for name, value in fields.items() if name in known})
    vocabulary = hf.vocab_size
    step = (getattr(args, "make_vocab_size_divisible_by", None) or 1) * config.tensor_model_parallel_size
    padded = math.ceil(vocabulary / step) * step
    return ModelDescription(family, hf, config, rope, vocabulary, padded, bool(hf.tie_word_embeddings))


# Fields of TransformerConfig that a flag of the same name decides, where it is set.
_SAME_NAME = (
    "apply_query_key_layer_scaling", "apply_rope_fusion", "attention_softmax_in_fp32", "bias_dropout_fusion",
    "deterministic_mode", "distribute_saved_activations", "hidden_dropout", "masked_softmax_fusion",
    "microbatch_group_size_per_vp_stage", "moe_aux_loss_coeff", "moe_expert_capacity_factor", "moe_grouped_gemm",
    "moe_input_jitter_eps", "moe_permute_fusion", "moe_router_dtype", "moe_router_force_load_balancing",
    "moe_shared_expert_overlap", "moe_token_dispatcher_type", "moe_token_drop_policy", "moe_z_loss_coeff",
    "recompute_granularity", "recompute_method", "recompute_modules", "recompute_num_layers", "attention_dropout",
)  # fmt: skip


def _flag_fields(args: Any) -> dict[str, Any]:
    """What flags decide, and the config of the model does not."""
    fields = {name: getattr(args, name, None) for name in _SAME_NAME}
    fields = {name: value for name, value in fields.items() if value is not None}
    balancing = getattr(args, "moe_router_load_balancing_type", None) or ["none"]
    fields["moe_router_load_balancing_type"] = balancing[0] if len(balancing) == 1 else balancing
    coefficients = fields.pop("moe_aux_loss_coeff", None) or [0.0]
    fields["moe_aux_loss_coeff"] = coefficients[0] if len(coefficients) == 1 else coefficients
    frozen = getattr(args, "freeze_e_score_correction_bias", False)
    fields["moe_router_bias_update_rate"] = 0.0 if frozen else getattr(args, "moe_router_bias_update_rate", 1e-3)
    # All-gather wants equally many tokens on all ranks; packed rows differ. The results are the same.
    if fields.get("moe_token_dispatcher_type", "allgather") == "allgather":
        fields["moe_token_dispatcher_type"] = "alltoall"
    fields["bias_activation_fusion"] = getattr(args, "bias_swiglu_fusion", False)
    return fields


def _parallel_fields(args: Any) -> dict[str, Any]:
    """The layout that `parallel_state` was initialised with."""
    tensor = parallel_state.get_tensor_model_parallel_world_size()
    virtual = parallel_state.get_virtual_pipeline_model_parallel_world_size()
    fields = {
        "tensor_model_parallel_size": tensor,
        "pipeline_model_parallel_size": parallel_state.get_pipeline_model_parallel_world_size(),
        "virtual_pipeline_model_parallel_size": virtual,
        "context_parallel_size": parallel_state.get_context_parallel_world_size(),
        "expert_model_parallel_size": parallel_state.get_expert_model_parallel_world_size(),
        "expert_tensor_parallel_size": parallel_state.get_expert_tensor_parallel_world_size(),
        "sequence_parallel": bool(getattr(args, "sequence_parallel", False)) and tensor > 1,
        "num_layers_in_first_pipeline_stage": getattr(args, "decoder_first_pipeline_num_layers", None),
        "num_layers_in_last_pipeline_stage": getattr(args, "decoder_last_pipeline_num_layers", None),
        "cp_comm_type": _single(getattr(args, "cp_comm_type", None)),
        # Packed rows differ in length from one micro-batch to the next.
        "variable_seq_lengths": True,
    }
    if virtual is not None:
        # Two stages exchange two messages at once, which batched sends would mix up.
        fields |= {"overlap_p2p_comm": True, "batch_p2p_comm": False}
    return fields


def _single(values: Any) -> Any:
    return values[0] if isinstance(values, list) and len(values) == 1 else values
