"""Whether a model divides among ranks: told from its config and the flags, before anything is built."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Sizes:
    """Ranks that share a model, by axis; `first_layers` and `last_layers` are of the outer stages where flags set them."""

    tensor: int = 1
    pipeline: int = 1
    expert: int = 1
    expert_tensor: int = 1
    virtual_stages: int | None = None
    virtual_layers: int | None = None
    first_layers: int | None = None
    last_layers: int | None = None


def indivisible(fields: dict[str, Any], sizes: Sizes, *, transformer_engine: bool) -> list[str]:
    """One message for each part of the model that does not divide.

    Args:
        fields: of `TransformerConfig`, as a family reads them from the config.
        transformer_engine: its layers keep the down projections of latent attention whole on every rank.
    """
    problems = [
        f"{flag} {ranks} does not divide the {length} {what}"
        for flag, ranks, length, what in _divisions(fields, sizes, transformer_engine)
        if length % ranks
    ]
    groups = fields["num_query_groups"]
    if groups % sizes.tensor and sizes.tensor % groups:
        problems.append(
            f"--tensor-model-parallel-size {sizes.tensor} and {groups} key-value heads do not divide each other"
        )
    return problems + _layer_problems(fields["num_layers"], sizes)


def _divisions(fields: dict[str, Any], sizes: Sizes, transformer_engine: bool) -> Iterator[tuple[str, int, int, str]]:
    tensor = ("--tensor-model-parallel-size", sizes.tensor)
    yield *tensor, fields["num_attention_heads"], "attention heads"
    experts = fields.get("num_moe_experts")
    if experts is None or 0 in fields["moe_layer_freq"]:
        yield *tensor, fields["ffn_hidden_size"], "columns of the MLP"
    if experts is not None:
        yield "--expert-model-parallel-size", sizes.expert, experts, "experts"
        yield (
            "--expert-tensor-parallel-size",
            sizes.expert_tensor,
            fields["moe_ffn_hidden_size"],
            "columns of an expert",
        )
        if shared := fields.get("moe_shared_expert_intermediate_size"):
            yield *tensor, shared, "columns of the shared experts"
    if fields.get("multi_latent_attention") and not transformer_engine:
        if rank := fields["q_lora_rank"]:
            yield *tensor, rank, "columns of the query latent"
        yield *tensor, fields["kv_lora_rank"] + fields["qk_pos_emb_head_dim"], "columns of the key-value latent"


def _layer_problems(layers: int, sizes: Sizes) -> list[str]:
    """Stages have equally many layers, but for those of the outer stages that are given."""
    given = [count for count in (sizes.first_layers, sizes.last_layers) if count is not None]
    left, stages = layers - sum(given), sizes.pipeline - len(given)
    if stages < 0 or left < 0 or (left % stages if stages else left):
        rest = f", {left} of them on the other {stages} stages" if given else ""
        return [f"--pipeline-model-parallel-size {sizes.pipeline} does not divide the {layers} layers{rest}"]
    per_stage = [*given, left // stages] if stages else given
    if sizes.virtual_stages is not None and any(count % sizes.virtual_stages for count in per_stage):
        return [
            f"--num-virtual-stages-per-pipeline-rank {sizes.virtual_stages} does not divide the {max(per_stage)} layers of a stage"
        ]
    if sizes.virtual_layers is not None and any(count % sizes.virtual_layers for count in per_stage):
        return [
            f"--num-layers-per-virtual-pipeline-stage {sizes.virtual_layers} does not divide the {max(per_stage)} layers of a stage"
        ]
    return []
