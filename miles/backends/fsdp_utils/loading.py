"""A Hugging Face directory becomes a sharded model: rank 0 reads, the others receive.

No rank ever holds more than one layer of an unsharded model beside what it was given, except rank 0's host copy.
"""

from __future__ import annotations

import copy
import logging
import pickle
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard

from miles.backends.fsdp_utils.packed_attention import choose_attention, register_packed_attention
from miles.backends.fsdp_utils.policy_model import PolicyModel
from miles.backends.training_utils.critic import add_value_head
from miles.backends.training_utils.model_dir import ModelDirError

logger = logging.getLogger(__name__)

# Below this many parameter bytes a model is one FSDP group: one all-gather and one reduce-scatter an optimizer step
# are faster than one a layer.
SINGLE_GROUP_BYTES = 1 << 30
# Below this many bytes in the compute dtype, parameters stay gathered from one optimizer step to the next; on a GPU
# below this share of its memory.
GATHERED_BYTES, GATHERED_SHARE = 4 << 30, 1 / 8


@dataclass(frozen=True)
class ShardingOptions:
    """How `load_policy` shards. `compute_dtype` None computes in the fp32 of the master weights."""

    mesh: DeviceMesh
    device: torch.device
    compute_dtype: torch.dtype | None = None
    master_dtype: torch.dtype | None = torch.float32  # None: parameters and optimizer in the compute dtype
    cpu_offload: bool = False
    attn_implementation: str = "sdpa"
    packed: bool = True
    share_prompts: bool = True
    gradient_checkpointing: bool = False
    trust_remote_code: bool = False
    value_head: bool = False  # of a critic, instead of the output projection
    seed: int = 0
    single_group_bytes: int = SINGLE_GROUP_BYTES
    gathered_bytes: int | None = None  # None: by the device

    @property
    def stored_dtype(self) -> torch.dtype:
        return self.master_dtype or self.compute_dtype or torch.float32

    def stays_gathered(self, num_params: int) -> bool:
        """Whether parameters that have been gathered are kept until the optimizer changes them."""
        limit = self.gathered_bytes
        if limit is None:
            limit = GATHERED_BYTES
            if self.device.type == "cuda":
                limit = int(torch.cuda.get_device_properties(self.device).total_memory * GATHERED_SHARE)
        return num_params * (self.compute_dtype or self.stored_dtype).itemsize <= limit


@dataclass
class LoadedPolicy:
    """A sharded model and what its export needs to know."""

    module: PolicyModel
    config: Any
    packed: bool
    shares_prompts: bool  # packed rows hold a prompt once for all its responses
    stays_gathered: bool  # between micro-batches and steps; otherwise layer by layer, as each one runs
    checkpoint_dtypes: dict[str, torch.dtype] = field(default_factory=dict)  # by parameter name of the HF model


def load_policy(path: Path, options: ShardingOptions) -> LoadedPolicy:
    """Build, shard and fill the model in `path`. Collective.

    Raises: ModelDirError when weights are missing or have another shape than the config says.
    """
    import transformers

    transformers.utils.logging.disable_progress_bar()
    register_packed_attention()
    rank0 = dist.get_rank() == 0
    config = transformers.AutoConfig.from_pretrained(path, trust_remote_code=options.trust_remote_code)
    source, error = _read(path, config, options) if rank0 else (None, None)
    _raise_everywhere(error)
    with torch.device("meta"):
        # A copy: building notes the dtype of these parameters in it, and exports carry the checkpoint's.
        hf = transformers.AutoModelForCausalLM.from_config(
            copy.deepcopy(config), dtype=options.stored_dtype, trust_remote_code=options.trust_remote_code
        )
    attention = choose_attention(hf, options.attn_implementation, pack=options.packed)
    if attention.reason is not None and rank0:
        layout = "packed" if attention.packed else "padded"
        logger.warning("%s: %s attention, %s rows", attention.reason, attention.implementation, layout)
    if options.value_head:
        add_value_head(hf, options, initialise=False)
    hf.set_attn_implementation(attention.implementation)
    if options.gradient_checkpointing:
        hf.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    policy = PolicyModel(hf, borders=attention.borders)
    num_params = sum(p.numel() for p in hf.parameters())
    gathered = options.stays_gathered(num_params)
    single = gathered and num_params * options.stored_dtype.itemsize <= options.single_group_bytes
    _materialise_and_shard(policy, options, single=single, gathered=gathered)
    dtypes = _fill(policy, source, options.stored_dtype)
    policy.find_out_head(options.device)
    if options.value_head and policy.hf.base_model is policy.hf:
        raise ModelDirError(f"{path}: this architecture has no backbone below its head, so it cannot be a critic")
    policy.plain_head = policy.plain_head or options.value_head
    reshard(policy)
    # The variable-length kernel of GPUs reads rows of whole sequences only.
    shares = options.share_prompts and attention.borders == "packed" and options.device.type == "cpu"
    return LoadedPolicy(policy, config, attention.packed, shares, gathered, dtypes)


def _read(path: Path, config: Any, options: ShardingOptions) -> tuple[nn.Module | None, str | None]:
    """Rank 0's host copy in the checkpoint's dtypes, or why there is none."""
    import transformers

    auto: Any = transformers.AutoModelForCausalLM
    try:
        model, info = auto.from_pretrained(
            path,
            dtype="auto",
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # reported below, all at once
            trust_remote_code=options.trust_remote_code,
        )
    except Exception as error:
        return None, f"{path} cannot be loaded as a causal language model: {type(error).__name__}: {error}"
    problems = [f"no weights for {name}" for name in sorted(info["missing_keys"])]
    problems += [f"{m[0]} has shape {tuple(m[1])}, config says {tuple(m[2])}" for m in info["mismatched_keys"]]
    if problems:
        more = f" and {len(problems) - 10} more" if len(problems) > 10 else ""
        return None, f"{path} does not hold the model that its config.json describes: {'; '.join(problems[:10])}{more}"
    if options.value_head:
        add_value_head(model, options, initialise=True)
    if info["unexpected_keys"]:
        logger.warning("%s: tensors that the model has no use for: %s", path, sorted(info["unexpected_keys"])[:10])
    return model, None


def _raise_everywhere(error: str | None) -> None:
    box = [error]
    dist.broadcast_object_list(box, src=0)
    if box[0] is not None:
        raise ModelDirError(box[0])


def _materialise_and_shard(policy: PolicyModel, options: ShardingOptions, *, single: bool, gathered: bool) -> None:
    """Replace meta tensors by empty ones and shard them: as a `single` group, or layer by layer."""
    mixed = MixedPrecisionPolicy(param_dtype=options.compute_dtype, reduce_dtype=torch.float32)
    offload = CPUOffloadPolicy(pin_memory=options.device.type == "cuda") if options.cpu_offload else OffloadPolicy()
    home = torch.device("cpu") if options.cpu_offload else options.device
    shard: dict[str, Any] = {
        "mesh": options.mesh,
        "mp_policy": mixed,
        "offload_policy": offload,
        "reshard_after_forward": not gathered,
    }
    sharded: set[nn.Module] = set()
    if not single:
        layer_classes = set(policy.hf._no_split_modules or [])
        tied = bool(getattr(policy.hf.config, "tie_word_embeddings", False))
        for module in list(policy.hf.modules()):
            if module in sharded:
                continue  # some architectures list both a block and what is inside it
            if type(module).__name__ in layer_classes or (isinstance(module, nn.Embedding) and not tied):
                module.to_empty(device=home)
                fully_shard(module, **shard)
                sharded |= set(module.modules())
    for module in policy.modules():
        if module not in sharded:
            module.to_empty(device=home, recurse=False)
    policy.hf.tie_weights()
    fully_shard(policy, **shard)
    for fsdp_module in fsdp_modules(policy):
        fsdp_module.set_force_sum_reduction_for_comms(True)
        fsdp_module.set_gradient_divide_factor(1.0)  # losses are normalised by totals over all ranks: sum, not mean


def fsdp_modules(policy: nn.Module) -> list[FSDPModule]:
    return [module for module in policy.modules() if isinstance(module, FSDPModule)]


def reshard(policy: nn.Module) -> None:
    """Drop gathered parameters, so that `parameters()` are the sharded ones that the optimizer updates."""
    for module in fsdp_modules(policy):
        module.reshard()


def persistent_buffers(policy: nn.Module) -> dict[str, torch.Tensor]:
    """Buffers that checkpoints store, by name (an expert router's correction bias, say)."""
    return {
        f"{prefix}.{name}" if prefix else name: buffer
        for prefix, module in policy.named_modules()
        for name, buffer in module.named_buffers(recurse=False)
        if name not in module._non_persistent_buffers_set
    }


def _fill(policy: PolicyModel, source: nn.Module | None, dtype: torch.dtype) -> dict[str, torch.dtype]:
    """Send rank 0's weights and buffers to every shard; returns the dtype of each parameter in the checkpoint."""
    state = {}
    if source is not None:
        state = {f"hf.{k}": v.to(dtype) if v.is_floating_point() else v for k, v in source.state_dict().items()}
    set_model_state_dict(policy, state, options=StateDictOptions(full_state_dict=True, broadcast_from_rank0=True))
    # Buffers that no checkpoint stores (rotary frequencies) are empty after the meta device.
    own = dict(source.named_buffers()) if source is not None else {}
    for name, buffer in policy.hf.named_buffers():
        value = own[name].to(buffer.device, buffer.dtype) if source is not None else torch.empty_like(buffer)
        dist.broadcast(value, src=0)
        buffer.copy_(value)
    meta: list[Any] = [None]
    if source is not None:
        kept = dict(source.named_parameters()) | persistent_buffers(source)
        meta = [
            (
                {name: value.dtype for name, value in kept.items()},
                _picklable(getattr(source, "_weight_conversions", None)),
            )
        ]
    dist.broadcast_object_list(meta, src=0)
    dtypes, conversions = meta[0]
    if conversions is not None:
        policy.hf._weight_conversions = conversions
    return dtypes


def _picklable(value: Any) -> Any:
    try:
        pickle.dumps(value)
    except Exception:
        return None
    return value
