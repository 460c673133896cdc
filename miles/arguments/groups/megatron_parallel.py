"""How Megatron spreads a model; FSDP is data parallel and takes only sizes of 1."""

from __future__ import annotations

from miles.arguments.flag import flag, group


@group("Parallelism, Megatron only", owner="megatron", system="megatron")
class MegatronParallelArgs:
    tensor_model_parallel_size: int = flag(1, "Ranks that share each matrix.", ge=1)
    pipeline_model_parallel_size: int = flag(1, "Stages that share the layers.", ge=1)
    context_parallel_size: int = flag(1, "Ranks that share each sequence.", ge=1)
    expert_model_parallel_size: int = flag(1, "Ranks that share the experts.", ge=1)
    expert_tensor_parallel_size: int | None = flag(
        None, "Ranks that share each expert's matrices. Unset: --tensor-model-parallel-size.", ge=1, neutral=(1,)
    )
    sequence_parallel: bool = flag(False, "Share activations between tensor-parallel ranks.")
    cp_comm_type: list[str] | None = flag(None, "How context-parallel ranks exchange keys and values.", metavar="TYPE")
    num_layers_per_virtual_pipeline_stage: int | None = flag(None, "Layers of a virtual stage.", ge=1)
    num_virtual_stages_per_pipeline_rank: int | None = flag(None, "Virtual stages of a rank.", ge=1)
    microbatch_group_size_per_vp_stage: int | None = flag(
        None, "Micro-batches that go through a virtual stage together.", ge=1
    )
    decoder_first_pipeline_num_layers: int | None = flag(None, "Layers of the first stage.", ge=1)
    decoder_last_pipeline_num_layers: int | None = flag(None, "Layers of the last stage.", ge=1)
    variable_seq_lengths: bool = flag(False, "Stages exchange sequences of different lengths (always so here).")
