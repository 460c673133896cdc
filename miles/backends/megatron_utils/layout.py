"""How the trainer's ranks are divided: tensor, pipeline, context, expert and data parallelism from the flags."""

from __future__ import annotations

import gc
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

from miles.backends.megatron_utils.platform import Platform
from miles.backends.training_utils.backend import TrainParallelConfig
from miles.utils.seeds import derive_seed

_groups: list[Any] = []  # process groups of the present layout


@dataclass(frozen=True)
class Layout:
    """This rank's place. `dp_rank` counts ranks with other samples: context-parallel ranks share theirs."""

    tp_size: int
    tp_rank: int
    pp_size: int
    pp_rank: int
    cp_size: int
    cp_rank: int
    dp_size: int
    dp_rank: int
    ep_size: int
    vpp_size: int
    microbatch_group_size: int
    sequence_parallel: bool

    @property
    def is_last_stage(self) -> bool:
        return self.pp_rank == self.pp_size - 1

    @property
    def counts_metrics(self) -> bool:
        """Whether this rank holds a step's metrics: its peers hold copies of them, or none."""
        return self.is_last_stage and self.tp_rank == 0 and self.cp_rank == 0

    @property
    def sequence_multiple(self) -> int:
        """What the length of each sequence is padded to."""
        return 2 * self.cp_size if self.cp_size > 1 else 1

    @property
    def row_multiple(self) -> int:
        """What the length of a whole row is padded to."""
        shares = self.tp_size if self.sequence_parallel else 1
        return shares * (2 * self.cp_size if self.cp_size > 1 else 1)

    def for_planner(self) -> TrainParallelConfig:
        return TrainParallelConfig(self.dp_size, self.cp_size, self.vpp_size, self.microbatch_group_size)


def initialize(args: Any, platform: Platform) -> Layout:
    """Divide the ranks of the initialised process group and seed their generators. Collective.

    Dropout differs between the tensor-parallel shares of a sequence and agrees where they hold the same values.
    Raises: ValueError for a layout that the world cannot hold.
    """
    tensor, pipeline = _size(args, "tensor"), _size(args, "pipeline")
    expert_tensor = getattr(args, "expert_tensor_parallel_size", None) or tensor
    world = dist.get_world_size()
    dense, sparse = tensor * pipeline * _size(args, "context"), expert_tensor * pipeline * _size(args, "expert")
    if world % dense or world % sparse:
        raise ValueError(
            f"{world} trainer ranks do not hold groups of {dense} ranks a model, and {sparse} for its experts"
        )
    if expert_tensor > 1 and _size(args, "expert") > 1 and platform.backend == "gloo":
        raise ValueError(
            f"--expert-tensor-parallel-size {expert_tensor} with --expert-model-parallel-size gathers unequal parts, which "
            "gloo cannot: set --expert-tensor-parallel-size 1 on a CPU"
        )
    virtual = virtual_stages(args)
    make_groups(
        tensor_model_parallel_size=tensor,
        pipeline_model_parallel_size=pipeline,
        virtual_pipeline_model_parallel_size=virtual if virtual > 1 else None,
        context_parallel_size=_size(args, "context"),
        expert_model_parallel_size=_size(args, "expert"),
        expert_tensor_parallel_size=expert_tensor,
        distributed_timeout_minutes=int(getattr(args, "distributed_timeout_minutes", 30)),
        # On a CPU the groups are gloo's already.
        create_gloo_process_groups=not platform.is_cpu,
    )
    layout = _read(args, virtual)
    seed = derive_seed(getattr(args, "seed", 0), "megatron", layout.pp_rank, layout.dp_rank) % 2**31
    model_parallel_cuda_manual_seed(seed, force_reset_rng=True)
    return layout


def make_groups(**sizes: Any) -> None:
    """megatron-core's groups, after the end of those of an earlier layout. Collective.

    megatron-core only forgets its groups, and every group of gloo has threads that wake a hundred times a second.
    """
    from torch.distributed.distributed_c10d import _world

    if parallel_state.model_parallel_is_initialized():
        parallel_state.destroy_model_parallel()
    gc.collect()  # models and optimizers of the earlier layout hold its groups
    while _groups:
        dist.destroy_process_group(_groups.pop())
    before = len(_world.pg_map)
    parallel_state.initialize_model_parallel(**sizes)
    _groups.extend(list(_world.pg_map)[before:])


def virtual_stages(args: Any) -> int:
    """Virtual pipeline stages of a rank, from either of the two flags; 1 without interleaving."""
    stages = getattr(args, "num_virtual_stages_per_pipeline_rank", None)
    layers = getattr(args, "num_layers_per_virtual_pipeline_stage", None)
    if stages is None and layers is not None:
        stages = _num_layers(args) // _size(args, "pipeline") // int(layers)
    return int(stages or 1)


def _num_layers(args: Any) -> int:
    import transformers

    config = transformers.AutoConfig.from_pretrained(
        args.hf_checkpoint, trust_remote_code=bool(getattr(args, "trust_remote_code", False))
    )
    return int(config.get_text_config().num_hidden_layers)


def _size(args: Any, axis: str) -> int:
    name = f"{axis}_parallel_size" if axis == "context" else f"{axis}_model_parallel_size"
    return int(getattr(args, name, 1) or 1)


def _read(args: Any, virtual: int) -> Layout:
    tensor = parallel_state.get_tensor_model_parallel_world_size()
    pipeline = parallel_state.get_pipeline_model_parallel_world_size()
    return Layout(
        tp_size=tensor,
        tp_rank=parallel_state.get_tensor_model_parallel_rank(),
        pp_size=pipeline,
        pp_rank=parallel_state.get_pipeline_model_parallel_rank(),
        cp_size=parallel_state.get_context_parallel_world_size(),
        cp_rank=parallel_state.get_context_parallel_rank(),
        dp_size=parallel_state.get_data_parallel_world_size(),
        dp_rank=parallel_state.get_data_parallel_rank(),
        ep_size=parallel_state.get_expert_model_parallel_world_size(),
        vpp_size=virtual,
        microbatch_group_size=int(getattr(args, "microbatch_group_size_per_vp_stage", None) or pipeline),
        sequence_parallel=bool(getattr(args, "sequence_parallel", False)) and tensor > 1,
    )
