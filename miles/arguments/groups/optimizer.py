"""Optimizer and learning-rate schedule, for both trainers."""

from __future__ import annotations

from miles.arguments.flag import flag, group


@group("Optimizer and schedule")
class OptimizerArgs:
    optimizer: str = flag(
        "adam",
        "Optimizer. adam is AdamW.",
        choices=("adam", "sgd", "muon"),
        later={"muon": "muon"},
    )
    lr: float = flag(1e-6, "Peak learning rate.", ge=0)
    min_lr: float = flag(0.0, "Learning rate at the end of the decay.", ge=0)
    lr_warmup_init: float = flag(0.0, "Learning rate at step 0.", ge=0)
    lr_warmup_iters: int = flag(0, "Optimizer steps over which the learning rate rises.", ge=0)
    lr_warmup_fraction: float | None = flag(None, "The same as a share of --lr-decay-iters.", ge=0, lt=1)
    lr_decay_style: str | None = flag(
        None,
        "Shape of the decay. Unset: constant under FSDP, linear under Megatron.",
        choices=("constant", "linear", "cosine", "inverse-square-root", "WSD"),
    )
    lr_decay_iters: int | None = flag(None, "Optimizer steps until --min-lr. Unset: the whole run.", ge=1)
    lr_wsd_decay_iters: int | None = flag(None, "Steps of the final decay of WSD.", ge=1, owner="wsd")
    lr_wsd_decay_style: str = flag(
        "exponential", "Its shape.", choices=("exponential", "linear", "cosine", "minus_sqrt"), owner="wsd"
    )
    weight_decay: float | None = flag(None, "Unset: 0 under FSDP, 0.01 under Megatron.", ge=0)
    start_weight_decay: float | None = flag(None, "Weight decay at step 0. Unset: --weight-decay.", ge=0)
    end_weight_decay: float | None = flag(None, "Weight decay at the end. Unset: --weight-decay.", ge=0)
    weight_decay_incr_style: str = flag(
        "constant", "How it goes from the one to the other.", choices=("constant", "linear", "cosine")
    )
    adam_beta1: float = flag(0.9, "First-moment decay.", ge=0, lt=1)
    adam_beta2: float | None = flag(
        None, "Second-moment decay. Unset: 0.95 under FSDP, 0.999 under Megatron.", ge=0, lt=1
    )
    adam_eps: float = flag(1e-8, "Added to the root of the second moment.", gt=0)
    clip_grad: float = flag(1.0, "Largest gradient norm; 0 does not clip.", ge=0)


@group("Optimizer, Megatron only", owner="megatron", system="megatron")
class MegatronOptimizerArgs:
    use_distributed_optimizer: bool = flag(False, "Shard optimizer state over data-parallel ranks.")
    optimizer_cpu_offload: bool = flag(False, "Run the optimizer on the host.", system="megatron-offload")
    optimizer_offload_fraction: float = flag(
        1.0, "Share of the state on the host.", ge=0, le=1, system="megatron-offload"
    )
    overlap_cpu_optimizer_d2h_h2d: bool = flag(False, "Overlap host steps with copies.", system="megatron-offload")
    use_precision_aware_optimizer: bool = flag(
        False, "Choose the types of main weights, gradients and moments.", system="megatron-offload"
    )
    offload_optimizer_states: bool = flag(
        False, "Move optimizer state to the host between steps.", system="megatron-offload"
    )
    overlap_grad_reduce: bool = flag(False, "Overlap gradient reduction with backward.")
    overlap_param_gather: bool = flag(False, "Overlap parameter gathering with forward.", system="megatron-tuning")
    accumulate_allreduce_grads_in_fp32: bool = flag(False, "Accumulate and reduce gradients in fp32.")
    gradient_accumulation_fusion: bool = flag(
        True, "Do not fuse gradient accumulation into matrix products.", off="--no-gradient-accumulation-fusion"
    )
    check_for_nan_in_loss_and_grad: bool = flag(
        True, "Do not check loss and gradients for NaN.", off="--no-check-for-nan-in-loss-and-grad"
    )
