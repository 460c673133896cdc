"""Mixture of experts, as Megatron launchers spell it."""

from __future__ import annotations

from miles.arguments.flag import flag, group


@group("Architecture, experts")
class MoeArchitectureArgs:
    num_experts: int | None = flag(None, "Experts of a layer.", ge=1)
    moe_ffn_hidden_size: int | None = flag(None, "Width of an expert.", ge=1)
    moe_router_topk: int | None = flag(None, "Experts of a token.", ge=1)
    moe_shared_expert_intermediate_size: int | None = flag(None, "Width of the shared experts together.", ge=0)
    moe_shared_expert_gate: bool = flag(False, "A gate on the shared expert.")
    moe_layer_freq: str | None = flag(None, "Which layers have experts: a period or a list expression.")
    moe_latent_size: int | None = flag(None, "Width that tokens are projected to before experts.", ge=1)
    moe_router_num_groups: int | None = flag(None, "Groups of experts for group-limited routing.", ge=1)
    moe_router_group_topk: int | None = flag(None, "Groups of a token.", ge=1)
    moe_router_score_function: str | None = flag(
        None, "How router logits become scores.", choices=("softmax", "sigmoid", "sqrtsoftplus")
    )
    moe_router_pre_softmax: bool = flag(False, "Softmax before top-k.")
    moe_router_topk_scaling_factor: float | None = flag(None, "Factor on the chosen scores.")
    moe_router_enable_expert_bias: bool = flag(False, "A bias that balances experts.")


@group("Experts, Megatron only", owner="megatron", system="megatron")
class MoeArgs:
    moe_router_load_balancing_type: list[str] | None = flag(None, "Kind of balancing loss.", metavar="TYPE")
    moe_aux_loss_coeff: list[float] | None = flag(
        None, "Weight of the balancing loss.", metavar="COEFF", neutral=([0.0],)
    )
    moe_z_loss_coeff: float | None = flag(None, "Weight of the router's z-loss.", neutral=(0.0,))
    moe_router_bias_update_rate: float = flag(1e-3, "Step of the balancing bias.", neutral=(0.0,))
    freeze_e_score_correction_bias: bool = flag(False, "Do not move the balancing bias.")
    moe_router_freeze_gate: bool = flag(False, "Do not train the router.", system="megatron-tuning")
    moe_router_dtype: str | None = flag(None, "Type of the router's computation.", choices=("fp32", "fp64"))
    moe_token_dispatcher_type: str = flag(
        "allgather", "How tokens reach experts.", choices=("allgather", "alltoall", "flex")
    )
    moe_enable_deepep: bool = flag(False, "Dispatch with DeepEP.", system="megatron-tuning")
    moe_flex_dispatcher_backend: str = flag(
        "deepep", "Kernels of the flex dispatcher.", choices=("deepep", "hybridep"), system="megatron-tuning"
    )
    moe_grouped_gemm: bool = flag(False, "One kernel for all experts of a rank.")
    moe_permute_fusion: bool = flag(False, "Fuse the permutation of tokens.")
    moe_token_drop_policy: str = flag("probs", "Which tokens a full expert drops.", choices=("probs", "position"))
    moe_expert_capacity_factor: float | None = flag(None, "Tokens an expert takes, over the average.")
    moe_shared_expert_overlap: bool = flag(False, "Overlap shared experts with dispatch.")
    moe_input_jitter_eps: float | None = flag(None, "Noise on the router's input.", neutral=(0.0,))
    moe_router_force_load_balancing: bool = flag(False, "Route at random, for benchmarks.")
    moe_router_force_biased: float | None = flag(
        None, "Add noise to router logits, for tests.", neutral=(0.0,), system="megatron-tuning"
    )
