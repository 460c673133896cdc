"""The model's architecture, as Megatron launchers spell it.

The Hugging Face config decides; what is given here is compared with it at startup, under either trainer.
"""

from __future__ import annotations

from miles.arguments.flag import flag, group


@group("Architecture (checked against the Hugging Face config)")
class ArchitectureArgs:
    num_layers: int | None = flag(None, "Transformer layers.", ge=1)
    hidden_size: int | None = flag(None, "Width of the residual stream.", ge=1)
    ffn_hidden_size: int | None = flag(None, "Width of the dense MLP.", ge=1)
    num_attention_heads: int | None = flag(None, "Query heads.", ge=1)
    group_query_attention: bool = flag(False, "Fewer key-value heads than query heads.")
    num_query_groups: int | None = flag(None, "Key-value heads.", ge=1)
    kv_channels: int | None = flag(None, "Width of a head.", ge=1)
    max_position_embeddings: int | None = flag(None, "Longest position.", ge=1)
    position_embedding_type: str | None = flag(
        None, "Kind of positions.", choices=("learned_absolute", "rope", "mrope", "yarn", "relative", "none")
    )
    use_rotary_position_embeddings: bool = flag(False, "Rotary positions (older spelling).")
    rotary_base: float | None = flag(None, "Base of the rotary frequencies.", gt=0)
    rotary_percent: float | None = flag(None, "Share of a head that is rotated.", gt=0, le=1)
    rotary_scaling_factor: float | None = flag(None, "Stretch of YaRN or linear scaling.", gt=0)
    rope_type: str | None = flag(None, "Rotary variant of latent attention.", choices=("rope", "yarn"))
    original_max_position_embeddings: int | None = flag(None, "Longest position before stretching.", ge=1)
    beta_fast: float | None = flag(None, "YaRN boundary.")
    beta_slow: float | None = flag(None, "YaRN boundary.")
    mscale: float | None = flag(None, "YaRN attention scale.")
    mscale_all_dim: float | None = flag(None, "YaRN attention scale, all dimensions.")
    add_position_embedding: bool = flag(True, "No learned positions.", off="--no-position-embedding")
    normalization: str | None = flag(None, "Kind of norm.", choices=("LayerNorm", "RMSNorm"))
    norm_epsilon: float | None = flag(None, "Added under the root of a norm.", gt=0)
    apply_layernorm_1p: bool = flag(False, "Norm weights are stored minus 1.")
    swiglu: bool = flag(False, "Gated MLP with SiLU.")
    add_bias_linear: bool = flag(True, "No biases in linear layers.", off="--disable-bias-linear")
    add_qkv_bias: bool = flag(False, "Biases on query, key and value.")
    qk_layernorm: bool = flag(False, "Norms on queries and keys.")
    untie_embeddings_and_output_weights: bool = flag(False, "The output head has weights of its own.")
    vocab_size: int | None = flag(None, "Tokens of the vocabulary.", ge=1)
    make_vocab_size_divisible_by: int | None = flag(None, "Pad the vocabulary to a multiple.", ge=1)
    attention_dropout: float | None = flag(None, "Unset: the config's.", ge=0, lt=1)
    hidden_dropout: float | None = flag(None, "Unset: the config's.", ge=0, lt=1)
    attention_output_gate: bool = flag(False, "A gate on the attention output.")
    window_size: str | None = flag(None, "Sliding window, as LEFT,RIGHT.")
    window_attn_skip_freq: str | None = flag(None, "Which layers have no window: a period or a list expression.")
    softmax_type: str | None = flag(
        None, "Attention softmax, with or without sinks.", choices=("vanilla", "off-by-one", "learnable")
    )
    activation_func_clamp_value: float | None = flag(None, "Clamp of the gated activation.", gt=0)
    activation_func_clamp_shared_expert: bool = flag(
        True, "Do not clamp shared experts.", off="--no-activation-func-clamp-shared-expert"
    )


@group("Architecture, latent and sparse attention")
class LatentAttentionArgs:
    multi_latent_attention: bool = flag(False, "Multi-head latent attention.")
    q_lora_rank: int | None = flag(None, "Rank of the query projection.", ge=1)
    kv_lora_rank: int | None = flag(None, "Rank of the key-value projection.", ge=1)
    qk_head_dim: int | None = flag(None, "Head width without positions.", ge=1)
    qk_pos_emb_head_dim: int | None = flag(None, "Head width with positions.", ge=1)
    v_head_dim: int | None = flag(None, "Head width of values.", ge=1)
    dsa_indexer_head_dim: int | None = flag(None, "Head width of the sparse-attention indexer.", ge=1)
    dsa_indexer_n_heads: int | None = flag(None, "Its heads.", ge=1)
    dsa_indexer_topk: int | None = flag(None, "Tokens that it keeps.", ge=1)
    dsv4_compress_ratios: list[int] | None = flag(None, "Compression of every layer.")
    dsv4_compress_rope_theta: float | None = flag(None, "Rotary base of compressed layers.")
    dsv4_hc_mult: int | None = flag(None, "Hyper-connection streams.")
    dsv4_hc_sinkhorn_iters: int | None = flag(None, "Sinkhorn iterations.")
    dsv4_n_hash_layers: int | None = flag(None, "Layers routed by hash.")
    dsv4_o_groups: int | None = flag(None, "Groups of the output projection.")
    dsv4_o_lora_rank: int | None = flag(None, "Its rank.")
    dsv4_window_size: int | None = flag(None, "Sliding window.")
    experimental_attention_variant: str | None = flag(None, "Attention variant of megatron-core.")
