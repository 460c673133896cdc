"""megatron-core's DDP and optimizers from the public flags; the learning rate is set by the schedule that both trainers share."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer.clip_grads import clip_grad_by_total_norm_fp32

from miles.backends.megatron_utils.platform import Platform

FP16_LOSS_SCALE = 4096.0


def wrap_chunks(args: Any, config: Any, chunks: Sequence[Any]) -> list[Any]:
    """The chunks with gradient buffers that are *summed* over data- and context-parallel ranks.

    `config.calculate_per_token_loss` must be set: without it gradients would be averaged.
    """
    overlap = bool(getattr(args, "overlap_grad_reduce", False))
    ddp = DistributedDataParallelConfig(
        grad_reduce_in_fp32=bool(getattr(args, "accumulate_allreduce_grads_in_fp32", False)) or not _half(args),
        overlap_grad_reduce=overlap,
        use_distributed_optimizer=bool(getattr(args, "use_distributed_optimizer", False)),
        check_for_nan_in_grad=False,  # looked at once a step, with the loss
    )
    if not config.calculate_per_token_loss:
        raise ValueError(
            "the model's config averages gradients: calculate_per_token_loss must be set before it is built"
        )
    wrapped = [DistributedDataParallel(config, ddp, chunk, disable_bucketing=i > 0) for i, chunk in enumerate(chunks)]
    config.finalize_model_grads_func = finalize_model_grads
    if overlap:
        syncs = [chunk.no_sync for chunk in wrapped]
        config.no_sync_func = syncs[0] if len(syncs) == 1 else syncs
    return wrapped


def build_optimizer(args: Any, chunks: Sequence[Any], platform: Platform) -> Any:
    """AdamW (or SGD) over the chunks' parameters; main parameters in fp32 where the model computes in less. Collective."""
    beta2 = getattr(args, "adam_beta2", None)
    fp16 = bool(getattr(args, "fp16", False))
    config = OptimizerConfig(
        optimizer=getattr(args, "optimizer", None) or "adam",
        lr=float(args.lr),
        weight_decay=float(getattr(args, "weight_decay", None) or 0.0),
        adam_beta1=float(getattr(args, "adam_beta1", 0.9)),
        adam_beta2=0.999 if beta2 is None else float(beta2),
        adam_eps=float(getattr(args, "adam_eps", 1e-8)),
        clip_grad=float(getattr(args, "clip_grad", 1.0)),
        fp16=fp16,
        bf16=compute_dtype(args, platform) == torch.bfloat16,
        params_dtype=compute_dtype(args, platform),
        loss_scale=FP16_LOSS_SCALE if fp16 else None,
        use_distributed_optimizer=bool(getattr(args, "use_distributed_optimizer", False)),
    )
    optimizer = get_megatron_optimizer(config, list(chunks), use_gloo_process_groups=not platform.is_cpu)
    for part in torch_optimizers(optimizer):
        _start_moments(part)
    return optimizer


def compute_dtype(args: Any, platform: Platform) -> torch.dtype:
    """Of parameters and activations: fp32 on a CPU unless a flag says otherwise, bfloat16 on a GPU."""
    if getattr(args, "fp16", False):
        return torch.float16
    return torch.bfloat16 if getattr(args, "bf16", False) or not platform.is_cpu else torch.float32


def parts(optimizer: Any) -> list[Any]:
    """The optimizers of dense and of expert parameters; those that hold any."""
    chained = getattr(optimizer, "chained_optimizers", [optimizer])
    return [part for part in chained if not getattr(part, "is_stub_optimizer", False)]


def torch_optimizers(optimizer: Any) -> list[torch.optim.Optimizer]:
    """torch's own AdamW, which stands in for the fused one where Transformer Engine and Apex are missing."""
    inner = [part.optimizer for part in parts(optimizer)]
    return [o for o in inner if isinstance(o, (torch.optim.AdamW, torch.optim.Adam))]


def _start_moments(optimizer: torch.optim.Optimizer) -> None:
    """Moments of zero after no step, so that a checkpoint has the same entries before the first step as after it."""
    for group in optimizer.param_groups:
        for p in group["params"]:
            optimizer.state[p] = {
                "step": torch.zeros((), dtype=torch.float32),
                "exp_avg": torch.zeros_like(p.data),
                "exp_avg_sq": torch.zeros_like(p.data),
            }


def reset_moments(optimizer: Any) -> None:
    for part in parts(optimizer):
        for state in part.optimizer.state.values():
            for value in state.values():
                if isinstance(value, torch.Tensor):
                    value.zero_()


def clip(optimizer: Any, grad_norm: float, max_norm: float) -> None:
    """Scale the gradients that `prepare_grads` made ready to a norm of at most `max_norm`, given their norm."""
    for part in parts(optimizer):
        parameters = part.get_parameters()
        if parameters and max_norm > 0:
            clip_grad_by_total_norm_fp32(parameters, max_norm=max_norm, total_norm=grad_norm)


def _half(args: Any) -> bool:
    return bool(getattr(args, "bf16", False) or getattr(args, "fp16", False))
