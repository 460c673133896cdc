"""This rank's part of the model: one `GPTModel` a virtual pipeline stage."""

from __future__ import annotations

from typing import Any

from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel

from miles.backends.megatron_utils.layer_spec import block_spec
from miles.backends.megatron_utils.model_description import ModelDescription
from miles.backends.megatron_utils.platform import Platform
from miles.backends.megatron_utils.rope import apply_frequencies
from miles.utils.imports import load_function


def build_model(args: Any, description: ModelDescription, platform: Platform) -> list[Any]:
    """Chunks of the model in the order of their virtual stages, with weights that are not loaded yet. Collective.

    `--custom-model-provider-path` builds them instead, if it is given.
    """
    stages = parallel_state.get_virtual_pipeline_model_parallel_world_size()
    chunks = []
    for stage in [None] if stages is None else range(stages):
        borders = {
            "pre_process": parallel_state.is_pipeline_first_stage(ignore_virtual=stage is None, vp_stage=stage),
            "post_process": parallel_state.is_pipeline_last_stage(ignore_virtual=stage is None, vp_stage=stage),
        }
        if provider := getattr(args, "custom_model_provider_path", None):
            only = {} if stage is None else {"vp_stage": stage}
            chunk = load_function(provider)(**borders, **only)
        else:
            chunk = _build_chunk(args, description, platform, stage, borders)
        apply_frequencies(chunk, description.rope)
        chunks.append(chunk)
    return chunks


def _build_chunk(
    args: Any, description: ModelDescription, platform: Platform, stage: int | None, borders: dict[str, bool]
) -> GPTModel:
    config = description.config
    spec = block_spec(args, config, transformer_engine=platform.has_transformer_engine, vp_stage=stage)
    return GPTModel(
        config=config,
        transformer_layer_spec=spec,
        vocab_size=description.padded_vocab_size,
        max_sequence_length=description.hf_config.max_position_embeddings,
        parallel_output=True,
        share_embeddings_and_output_weights=description.tied,
        position_embedding_type="rope",
        rotary_base=description.rope.base,
        rotary_percent=description.rope.share,
        vp_stage=stage,
        **borders,
    )
