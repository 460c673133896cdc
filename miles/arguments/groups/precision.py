"""Number formats of the trainer."""

from __future__ import annotations

from miles.arguments.flag import flag, group


@group("Precision")
class PrecisionArgs:
    bf16: bool = flag(
        False, "Compute in bfloat16. The default on a GPU, unless --fp16; on a CPU the default is float32."
    )
    fp16: bool = flag(False, "Compute in float16.")


@group("Precision, Megatron only", owner="megatron", system="megatron")
class MegatronPrecisionArgs:
    transformer_impl: str = flag(
        "transformer_engine", "Layer implementation.", choices=("local", "transformer_engine", "inference_optimized")
    )
    fp8_format: str | None = flag(None, "Train in FP8.", choices=("e4m3", "hybrid"), system="megatron-formats")
    fp8_recipe: str = flag(
        "delayed",
        "Scaling of FP8.",
        choices=("delayed", "tensorwise", "blockwise", "mxfp8", "custom"),
        system="megatron-formats",
    )
    fp8_param_gather: bool = flag(False, "Gather parameters in FP8.", system="megatron-formats")
    fp4_format: str | None = flag(None, "Train in FP4.", choices=("e2m1",), system="megatron-formats")
    fp4_recipe: str = flag("nvfp4", "Scaling of FP4.", choices=("nvfp4", "custom"), system="megatron-formats")
    te_precision_config_file: list[str] | None = flag(
        None,
        "Precision of single tensors, for Transformer Engine.",
        metavar="FILE",
        system="megatron-formats",
    )
    first_last_layers_bf16: bool = flag(False, "Keep the first and last layers in bfloat16.", system="megatron-formats")
    num_layers_at_start_in_bf16: int = flag(1, "How many at the start.", ge=0, system="megatron-formats")
    num_layers_at_end_in_bf16: int = flag(1, "How many at the end.", ge=0, system="megatron-formats")
    attention_softmax_in_fp32: bool = flag(False, "Attention probabilities in fp32.")
    apply_query_key_layer_scaling: bool = flag(False, "Scale attention scores by the layer's number.")
    masked_softmax_fusion: bool = flag(True, "Do not fuse mask and softmax.", off="--no-masked-softmax-fusion")
    bias_swiglu_fusion: bool = flag(True, "Do not fuse bias and SwiGLU.", off="--no-bias-swiglu-fusion")
    bias_dropout_fusion: bool = flag(True, "Do not fuse bias and dropout.", off="--no-bias-dropout-fusion")
    apply_rope_fusion: bool = flag(True, "Do not fuse rotary embeddings.", off="--no-rope-fusion")
    attention_backend: str = flag("auto", "Attention kernels.", choices=("auto", "flash", "fused", "unfused", "local"))
    use_cpu_initialization: bool = flag(False, "Create weights on the host.")
    enable_experimental: bool = flag(False, "Allow megatron-core's experimental features.", system="megatron-tuning")
    manual_gc: bool = flag(False, "Collect garbage at chosen points only.", system="megatron-tuning")


@group("Recomputation, Megatron only", owner="megatron", system="megatron")
class RecomputeArgs:
    recompute_granularity: str | None = flag(None, "What backward computes again.", choices=("full", "selective"))
    recompute_method: str | None = flag(None, "Which layers, for full.", choices=("uniform", "block"))
    recompute_num_layers: int | None = flag(None, "How many layers in a unit.", ge=1)
    recompute_modules: list[str] | None = flag(None, "Which modules, for selective.")
