"""The FSDP2 trainer."""

from __future__ import annotations

from miles.arguments.flag import flag, group


@group("FSDP trainer", owner="fsdp")
class FsdpArgs:
    config: str | None = flag(None, "YAML with FSDP flags; the command line wins over it.", metavar="FILE", path="file")
    attn_implementation: str | None = flag(
        None, "Attention kernels of transformers. Unset: flash_attention_2 on a GPU that has it, otherwise sdpa."
    )
    gradient_checkpointing: bool = flag(False, "Compute activations again in backward, to save memory.")
    keep_fp32_master: bool = flag(
        True, "Optimizer and parameters in fp32, compute in --bf16 or --fp16.", negatable=True
    )
    fsdp_state_dict_cpu_offload: bool = flag(
        True, "Nothing.", negatable=True, dead="every rank writes its shard; nothing is gathered"
    )
    fsdp_cpu_offload: bool = flag(False, "Keep parameters, gradients and optimizer on the host; compute on the GPU.")
    fsdp_cpu_backend: str = flag("gloo", "Collectives of host tensors.", choices=("gloo",))
    dp_replicate_size: int = flag(1, "Replicas, each sharded over the remaining ranks.", ge=1)
    use_checkpoint_lr_scheduler: bool = flag(
        True, "Resume the learning-rate schedule from the checkpoint.", negatable=True
    )
    override_lr_scheduler: bool = flag(False, "Use the schedule given now instead of the checkpoint's.")
    warmup_ratio: float = flag(0.03, "Nothing.", dead="the schedule reads --lr-warmup-fraction and --lr-warmup-iters")
