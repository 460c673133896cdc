"""The model of `--hf-checkpoint` against what the Megatron trainer can build, and against the ranks that are to share it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from miles.arguments.args import FLAGS, Args
from miles.arguments.devices import has_package
from miles.arguments.rules.rule import RuleSet

# Flags whose values only the name-map families know -> the field of megatron-core's config.
FIELDS = {
    "normalization": "normalization",
    "qk_layernorm": "qk_layernorm",
    "add_qkv_bias": "add_qkv_bias",
    "add_bias_linear": "add_bias_linear",
    "multi_latent_attention": "multi_latent_attention",
    "rope_type": "rope_type",
    "moe_shared_expert_intermediate_size": "moe_shared_expert_intermediate_size",
    "moe_router_pre_softmax": "moe_router_pre_softmax",
    "moe_router_enable_expert_bias": "moe_router_enable_expert_bias",
    "moe_layer_freq": "moe_layer_freq",
}


def problems(args: Args) -> Iterator[str]:
    """An unknown architecture; otherwise flags that contradict it and sizes that do not divide it."""
    if args.train_backend != "megatron":
        return
    config = _config(args)
    if config is None:
        return
    from miles.backends.megatron_utils.divisibility import indivisible
    from miles.backends.megatron_utils.families.family import UnsupportedModelError
    from miles.backends.megatron_utils.families.registry import family_of
    from miles.backends.megatron_utils.rope import read_rope

    try:
        fields = family_of(config, args.model_name).fields(config)
        read_rope(config)
    except UnsupportedModelError as error:
        yield f"--hf-checkpoint {args.hf_checkpoint}: {error}"
        return
    wrong = [
        f"{FLAGS[name].option} {getattr(args, name)} (config: {fields.get(field, False)})"
        for name, field in FIELDS.items()
        if name in args.given and not _agrees(getattr(args, name), fields.get(field, False))
    ]
    if wrong:
        yield f"architecture flags that contradict the model of {args.hf_checkpoint}: {', '.join(wrong)}. Drop or correct them"
    yield from indivisible(fields, _sizes(args), transformer_engine=_transformer_engine(args))


def _config(args: Args) -> Any:
    """The text part of the model's config; None where it cannot be read, which other rules report."""
    import transformers

    try:
        config = transformers.AutoConfig.from_pretrained(
            args.hf_checkpoint, trust_remote_code=args.trust_remote_code, local_files_only=True
        )
    except (OSError, ValueError, TypeError):
        return None
    return config.get_text_config()


def _agrees(given: Any, actual: Any) -> bool:
    if given is None:
        return True
    if isinstance(actual, list):  # --moe-layer-freq: a period, or a list expression of 0 and 1
        text = str(given).strip()
        if text.isdecimal():
            return actual == [int(i % int(text) == 0) for i in range(len(actual))]
        return "".join(str(i) for i in actual) == _pattern(text)
    return given == actual


def _pattern(text: str) -> str:
    """`([0]*3+[1]*58)` as the digits that it stands for; an empty text where it is another expression."""
    digits = ""
    for part in text.strip("() ").replace(" ", "").split("+"):
        values, _, times = part.partition("*")
        inner = values.strip("[]()").replace(",", "")
        if not values.startswith("[") or not set(inner) <= {"0", "1"} or not (times or "1").isdecimal():
            return ""
        digits += inner * int(times or 1)
    return digits


def _sizes(a: Args) -> Any:
    from miles.backends.megatron_utils.divisibility import Sizes

    return Sizes(
        tensor=a.tensor_model_parallel_size,
        pipeline=a.pipeline_model_parallel_size,
        expert=a.expert_model_parallel_size,
        expert_tensor=a.expert_tensor_parallel_size or a.tensor_model_parallel_size,
        virtual_stages=a.num_virtual_stages_per_pipeline_rank,
        virtual_layers=a.num_layers_per_virtual_pipeline_stage,
        first_layers=a.decoder_first_pipeline_num_layers,
        last_layers=a.decoder_last_pipeline_num_layers,
    )


def _transformer_engine(args: Args) -> bool:
    on = args.train_device == "cuda" and has_package("transformer_engine")
    return on and args.transformer_impl == "transformer_engine"


RULES = (RuleSet("megatron-model", problems, system="megatron"),)
