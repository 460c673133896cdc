"""Parallel layouts that the Megatron trainer cannot run, or would run wrongly without a word."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from miles.arguments.args import Args
from miles.arguments.devices import has_package
from miles.arguments.rules.architecture import Config, read_config
from miles.arguments.rules.rule import RuleSet


def _on(a: Args) -> bool:
    return a.train_backend == "megatron" and not a.debug_rollout_only


def _experts(config: Config) -> int:
    return int(config.get("num_experts") or config.get("n_routed_experts") or config.get("num_local_experts") or 0)


def dividing(a: Args) -> Iterator[str]:
    """The ranks that share the experts, against all ranks; see `megatron_model` for the sizes of the model."""
    if not _on(a) or not _has_experts(a):
        return
    ranks = a.actor_num_nodes * a.actor_num_gpus_per_node
    expert_tensor = a.expert_tensor_parallel_size or a.tensor_model_parallel_size
    sharing = expert_tensor * a.expert_model_parallel_size * a.pipeline_model_parallel_size
    if ranks % sharing:
        yield (
            f"--expert-tensor-parallel-size x --expert-model-parallel-size x --pipeline-model-parallel-size = {sharing} does "
            f"not divide the {ranks} trainer ranks"
        )


def _has_experts(a: Args) -> bool:
    return _experts(read_config(a.hf_checkpoint)) > 0


def _virtual(a: Args) -> bool:
    return bool(a.num_virtual_stages_per_pipeline_rank or a.num_layers_per_virtual_pipeline_stage)


_COMBINATIONS: tuple[tuple[Callable[[Args], object], str], ...] = (
    (
        lambda a: a.expert_model_parallel_size > 1 and not _has_experts(a),
        "--expert-model-parallel-size {0.expert_model_parallel_size}: the model has no experts",
    ),
    (
        lambda a: a.tensor_model_parallel_size > 1 and not a.sequence_parallel and _has_experts(a),
        "a model with experts and --tensor-model-parallel-size {0.tensor_model_parallel_size} needs --sequence-parallel",
    ),
    (
        lambda a: (
            _has_experts(a)
            and a.expert_model_parallel_size == 1
            and a.expert_tensor_parallel_size not in (None, a.tensor_model_parallel_size)
        ),
        "--expert-tensor-parallel-size {0.expert_tensor_parallel_size} with --expert-model-parallel-size 1: megatron-core "
        "would not add up the gradients of experts over tensor-parallel ranks. Leave it out, or share the experts "
        "between ranks",
    ),
    (
        lambda a: (
            a.train_device == "cpu"
            and a.expert_model_parallel_size > 1
            and (a.expert_tensor_parallel_size or a.tensor_model_parallel_size) > 1
        ),
        "--expert-tensor-parallel-size {0.expert_tensor_parallel_size} with --expert-model-parallel-size gathers unequal "
        "parts, which gloo cannot: set --expert-tensor-parallel-size 1 on a CPU",
    ),
    (
        lambda a: a.num_virtual_stages_per_pipeline_rank and a.num_layers_per_virtual_pipeline_stage,
        "--num-virtual-stages-per-pipeline-rank and --num-layers-per-virtual-pipeline-stage say the same thing: give one",
    ),
    (
        lambda a: _virtual(a) and a.pipeline_model_parallel_size == 1,
        "virtual pipeline stages have no effect with --pipeline-model-parallel-size 1: drop them",
    ),
    (
        lambda a: a.recompute_granularity == "full" and not (a.recompute_method and a.recompute_num_layers),
        "--recompute-granularity full needs --recompute-method (uniform or block) and --recompute-num-layers",
    ),
    (
        lambda a: a.loss_type == "custom_loss" and a.context_parallel_size > 1,
        "--loss-type custom_loss gets the logits of whole sequences: set --context-parallel-size 1",
    ),
    (
        lambda a: a.moe_token_dispatcher_type == "flex",
        "--moe-token-dispatcher-type flex needs DeepEP, which this version does not use: set alltoall",
    ),
)


def combining(a: Args) -> Iterator[str]:
    """What megatron-core, or gloo, does not do together."""
    if _on(a):
        yield from (say.format(a) for broken, say in _COMBINATIONS if broken(a))


def installed(a: Args) -> Iterator[str]:
    if _on(a) and not has_package("megatron.core"):
        yield (
            "--train-backend megatron needs megatron-core, which is not installed: pip install 'miles[megatron]', or use "
            "--train-backend fsdp"
        )


RULES = (
    RuleSet("megatron-is-installed", installed),
    RuleSet("megatron-layout-divides", dividing),
    RuleSet("megatron-layout-combines", combining),
)
