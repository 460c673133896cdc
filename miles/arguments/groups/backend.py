"""The trainer: which backend, numerics that both backends share, how many tokens go through it at once."""

from __future__ import annotations

from miles.arguments.flag import flag, group


@group("Trainer backend")
class BackendArgs:
    train_backend: str | None = flag(
        None,
        "Trainer. Unset: megatron where GPUs and megatron-core are, otherwise fsdp.",
        choices=("megatron", "fsdp"),
    )
    qkv_format: str = flag(
        "thd",
        "Batch layout: thd packs sequences into one row, bshd pads them.",
        choices=("thd", "bshd"),
    )
    deterministic_mode: bool = flag(
        False, "Only deterministic kernels in the trainer. CPU runs are deterministic without it."
    )
    recompute_loss_function: bool = flag(
        False,
        "Checkpoint the loss: compute it again in backward instead of keeping its intermediates.",
        system="megatron-tuning",
    )
    log_probs_chunk_size: int = flag(
        -1, "Rows of logits held at once when log-probs are computed; -1 lets the backend choose.", ge=-1
    )
    disable_prompt_sharing: bool = flag(
        False,
        "Compute the prompt of every sample of a packed micro-batch, also where several samples start with the same "
        "one. Sharing changes nothing but rounding; the FSDP trainer does it on CPUs.",
    )
    debug_skip_weight_update: bool = flag(False, "Never send weights to the engines (debugging).")
    debug_disable_optimizer: bool = flag(
        False,
        "Skip optimizer steps (debugging). Optimizer state is then neither loaded nor saved.",
        system="megatron-tuning",
    )
    mfu_peak_tflops: float | None = flag(
        None,
        "Peak TFLOP/s of one device, the denominator of MFU. Unset: MFU is reported where the device is known.",
        gt=0,
        system="megatron",
    )
    true_on_policy_mode: bool = flag(
        False,
        "Engine and trainer log-probs equal bit for bit: deterministic kernels on both sides.",
        system="true-on-policy",
    )
    true_on_policy_contract: str | None = flag(None, "Name of the true-on-policy profile.", system="true-on-policy")
    recompute_logprobs_via_prefill: bool = flag(
        False, "Let engines score finished responses again by a prefill pass.", system="true-on-policy"
    )
    batch_invariant_mode: bool = flag(
        False, "Kernels whose results do not depend on the batch around a sequence.", system="true-on-policy"
    )


@group("Trainer backend, Megatron only", owner="megatron", system="megatron")
class MegatronBackendArgs:
    megatron_to_hf_mode: str = flag(
        "raw",
        "How Megatron weights become Hugging Face tensors.",
        choices=("raw", "bridge"),
        later={"bridge": "megatron-bridge"},
    )
    linear_attention_backend: str = flag(
        "fla", "Kernels of gated delta-net layers.", choices=("fla", "flashqla"), system="sparse-attention"
    )
    miles_dsa_topk_backend: str = flag(
        "torch",
        "Top-k of the sparse-attention indexer.",
        choices=("torch", "flashinfer"),
        system="sparse-attention",
    )
    dsa_attention_backend: str = flag(
        "tilelang",
        "Sparse-attention kernels in bridge mode.",
        choices=("megatron", "tilelang"),
        system="sparse-attention",
    )
    extra_high_precision_layers_hf: list[str] = flag(
        [],
        "Substrings of Hugging Face tensor names that stay unquantised.",
        system="megatron-formats",
    )
    extra_high_precision_layers_megatron: list[str] = flag(
        [],
        "Substrings of Megatron parameter names that stay unquantised.",
        system="megatron-formats",
    )
    custom_model_provider_path: str | None = flag(
        None,
        "Builds the model: (pre_process, post_process) -> model; with virtual stages, vp_stage too.",
        hook="model_provider",
    )
    custom_megatron_init_path: str | None = flag(None, "Called with (args) when a rank starts.", hook="megatron_init")
    custom_megatron_before_log_prob_hook_path: str | None = flag(
        None, "Called with (args, model, store_prefix) before a scoring pass.", hook="before_log_prob"
    )
    custom_megatron_before_train_step_hook_path: str | None = flag(
        None,
        "Called with (args, rollout_id, step_id, model, optimizer, opt_param_scheduler) before each optimizer step.",
        hook="before_train_step",
    )
    custom_megatron_post_save_hook_path: str | None = flag(
        None,
        "Called with (args, rollout_id, checkpoint_dir, hf_checkpoint_dir) after a checkpoint; needs --save.",
        hook="post_save",
    )
    spec: list[str] | None = flag(None, "Layer spec as MODULE FUNCTION.", metavar=("MODULE", "FUNCTION"), nargs=2)
    indep_dp: bool = flag(False, "Make each data-parallel replica a world of its own.", system="ft-trainer")
    delay_split_train_data_by_dp: bool = flag(
        False,
        "Split training data over ranks in the trainer instead of in the rollout manager.",
        system="megatron-tuning",
    )
    allgather_cp: bool = flag(
        False, "Context parallelism by contiguous shards and all-gather (sparse attention).", system="megatron-tuning"
    )
    low_memory_resume: bool = flag(
        False, "Allocate optimizer state on the CPU while a checkpoint loads.", system="megatron-tuning"
    )
    freeze_indexer: bool = flag(False, "Do not train the sparse-attention indexer.", system="sparse-attention")
    enable_mtp_training: bool = flag(False, "Train the multi-token-prediction layers too.", system="mtp")
    mtp_num_layers: int | None = flag(None, "Multi-token-prediction layers of the model.", ge=0, system="mtp")
    mtp_loss_scaling_factor: float = flag(0.2, "Weight of the multi-token-prediction loss.", ge=0, system="mtp")
