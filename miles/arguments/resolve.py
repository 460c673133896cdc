"""Values that are not given but follow from others: one table, applied in order, each step with its reason.

A step is a pure function from the arguments to the values that it fills in; it never overrides what was given, except
where the reason says that one flag decides another.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from miles.arguments.args import Args
from miles.arguments.devices import has_gpu, has_package
from miles.backends.engine_api.topology import TopologyError, devices_of

TRACKER = "latest_checkpointed_iteration.txt"


@dataclass(frozen=True)
class Resolve:
    """One step. `fill` returns the values to set; an empty dict when there is nothing to do."""

    why: str
    fill: Callable[[Args], dict[str, Any]]


def resolve(args: Args) -> None:
    """Fill in what was not given."""
    for step in STEPS:
        values = {name: value for name, value in step.fill(args).items() if getattr(args, name) != value}
        args.update(values, step.why)


def _unset(a: Args, **fallbacks: Any) -> dict[str, Any]:
    """Those of `fallbacks` whose flag has no value yet."""
    return {name: value for name, value in fallbacks.items() if getattr(a, name) is None}


# ---- devices and backends ----------------------------------------------------------------------------------------------


def _train_backend(a: Args) -> dict[str, Any]:
    megatron = a.train_device == "cuda" and has_package("megatron.core")
    return _unset(a, train_backend="megatron" if megatron else "fsdp")


def _rollout_engine(a: Args) -> dict[str, Any]:
    installed = a.sglang_python is not None or has_package("sglang")
    sglang = has_gpu() and installed
    return _unset(a, rollout_engine="sglang" if sglang else "embedded")


def _engine_type(a: Args) -> dict[str, Any]:
    """SGLang would serve float32 weights as float16 otherwise. CPUs compute float32 best; a GPU trainer computes bfloat16."""
    if a.rollout_engine != "sglang":
        return {}
    if a.train_device == "cpu":
        return _unset(a, sglang_dtype="float32")
    return _unset(a, sglang_dtype="bfloat16") if _stored_type(a.hf_checkpoint) == "float32" else {}


def _stored_type(directory: str | None) -> str | None:
    """The dtype that the model's config names; None where it cannot be read."""
    try:
        config = json.loads((Path(directory or "") / "config.json").read_text())
    except (OSError, ValueError):
        return None
    return config.get("dtype") or config.get("torch_dtype") or "float32"


def _attention(a: Args) -> dict[str, Any]:
    if a.train_backend != "fsdp":
        return {}
    flash = a.train_device == "cuda" and has_package("flash_attn")
    return _unset(a, attn_implementation="flash_attention_2" if flash else "sdpa")


def _compute_type(a: Args) -> dict[str, Any]:
    if a.train_device == "cuda" and not (a.bf16 or a.fp16):
        return {"bf16": True}
    return {}


def _optimizer(a: Args) -> dict[str, Any]:
    megatron = a.train_backend == "megatron"
    return _unset(
        a,
        lr_decay_style="linear" if megatron else "constant",
        weight_decay=0.01 if megatron else 0.0,
        adam_beta2=0.999 if megatron else 0.95,
    )


# ---- modes -------------------------------------------------------------------------------------------------------------


def _dump_details(a: Args) -> dict[str, Any]:
    if a.dump_details is None:
        return {}
    root = a.dump_details
    return _unset(
        a,
        save_debug_rollout_data=f"{root}/rollout_data/{{rollout_id}}.pt",
        save_debug_train_data=f"{root}/train_data/{{rollout_id}}_{{rank}}.pt",
        save_debug_trajectory_data=f"{root}/trajectory/{{rollout_id}}.jsonl",
    )


def _colocated_gpus(a: Args) -> dict[str, Any]:
    return {"rollout_num_gpus": a.actor_num_nodes * a.actor_num_gpus_per_node} if a.colocate else {}


def _engine_devices(a: Args) -> dict[str, Any]:
    if a.rollout_external:
        return _unset(a, rollout_num_gpus=len(a.rollout_external_engine_addrs or ()) * a.rollout_num_gpus_per_engine)
    if a.sglang_config is None or a.rollout_num_gpus is not None:
        return {}
    try:
        return {"rollout_num_gpus": devices_of(a)}
    except TopologyError:
        return {}  # a rule tells what is wrong with it


def _offload(a: Args) -> dict[str, Any]:
    shared = a.offload or (a.colocate and a.train_device == "cuda")
    critic = a.advantage_estimator == "ppo" and a.train_device == "cuda"  # it is on the trainer's devices
    return _unset(a, offload_train=shared or critic, offload_rollout=shared)


def _transport(a: Args) -> dict[str, Any]:
    given = "update_weight_transfer_mode" in a.given
    # Every rank of FSDP can hold the whole model for the engine on its device; Megatron's ranks hold parts.
    whole = a.train_backend == "fsdp" or a.actor_num_nodes * a.actor_num_gpus_per_node == 1
    handles = a.colocate and a.train_device == "cuda" and whole and a.rollout_num_gpus_per_engine == 1 and not given
    return {"update_weight_transfer_mode": "ipc"} if handles else {}


def _weight_check(a: Args) -> dict[str, Any]:
    half = a.debug_rollout_only or a.debug_train_only or a.debug_skip_weight_update
    wanted = a.ci_test and not a.ci_disable_weight_update_checker and not half
    return {"check_weight_update_equal": True} if wanted else {}


def _replay(a: Args) -> dict[str, Any]:
    routing = {"use_routing_replay": True} if a.use_rollout_routing_replay else {}
    return routing | ({"use_indexer_replay": True} if a.use_rollout_indexer_replay else {})


# ---- batches -----------------------------------------------------------------------------------------------------------


def _global_batch_size(a: Args) -> dict[str, Any]:
    if a.rollout_batch_size is None:
        return {}
    samples = a.rollout_batch_size * a.n_samples_per_prompt
    return _unset(a, global_batch_size=max(samples // (a.num_steps_per_rollout or 1), 1))


def _num_steps(a: Args) -> dict[str, Any]:
    if a.rollout_batch_size is None or a.global_batch_size is None:
        return {}
    samples = a.rollout_batch_size * a.n_samples_per_prompt
    return _unset(a, num_steps_per_rollout=max(samples // a.global_batch_size, 1))


def _prompt_len(a: Args) -> dict[str, Any]:
    if a.rollout_max_context_len is None:
        return {}
    return _unset(a, rollout_max_prompt_len=a.rollout_max_context_len - 1)


def _eval_from_rollout(a: Args) -> dict[str, Any]:
    return _unset(
        a,
        eval_temperature=a.rollout_temperature,
        eval_top_p=a.rollout_top_p,
        eval_top_k=a.rollout_top_k,
        eval_max_response_len=a.rollout_max_response_len,
        eval_max_prompt_len=a.rollout_max_prompt_len,
        eval_max_context_len=a.rollout_max_context_len,
        eval_input_key=a.input_key,
        eval_label_key=a.label_key,
        eval_tool_key=a.tool_key,
        eval_reward_key=a.reward_key,
        eval_function_path=a.rollout_function_path,
    )


def _eval_pairs(a: Args) -> dict[str, Any]:
    single = a.eval_prompt_data is not None and len(a.eval_prompt_data) == 1
    return {"eval_prompt_data": ["aime", *a.eval_prompt_data]} if single else {}


# ---- files -------------------------------------------------------------------------------------------------------------


def has_checkpoint(folder: str | None) -> bool:
    return folder is not None and (Path(folder) / TRACKER).is_file()


def _fresh_start(a: Args) -> dict[str, Any]:
    """A restartable command names one folder for --load and --save; it is empty the first time."""
    same = a.load is not None and a.save is not None and os.path.abspath(a.load) == os.path.abspath(a.save)
    return {"load": None} if same and not has_checkpoint(a.load) else {}


def _reference(a: Args) -> dict[str, Any]:
    return _unset(a, ref_load=a.hf_checkpoint) if a.kl_coef != 0 or a.use_kl_loss else {}


def _beside(folder: str | None) -> str | None:
    """Where the critic of the run that saves in `folder` saves: the same name with `_critic`."""
    if folder is None:
        return None
    path = Path(folder)
    return f"{path.parent if path.name.startswith('iter_') else path}_critic"


def _critic(a: Args) -> dict[str, Any]:
    if a.advantage_estimator != "ppo":
        return {}
    return _unset(
        a,
        # --load may also be a Hugging Face directory: the critic starts from it too.
        critic_load=a.load if a.load and (Path(a.load) / "config.json").is_file() else _beside(a.load),
        critic_save=_beside(a.save),
        critic_lr=a.lr,
        critic_num_nodes=a.actor_num_nodes,
        critic_num_gpus_per_node=a.actor_num_gpus_per_node,
    )


def _absolute(a: Args) -> dict[str, Any]:
    """Ray's workers may run in another folder than the driver."""
    outputs = ("load", "save", "critic_load", "critic_save", "save_hf", "run_dir", "dump_details")
    inputs = ("hf_checkpoint", "ref_load", "chat_template_path")
    paths = {name: getattr(a, name) for name in (*outputs, *inputs)}
    return {n: os.path.abspath(p) for n, p in paths.items() if p and (n in outputs or os.path.exists(p))}


def _run_name(a: Args) -> dict[str, Any]:
    if a.run_dir is not None:
        return _unset(a, run_name=Path(a.run_dir).name)
    model = Path(a.hf_checkpoint).name if a.hf_checkpoint else "run"
    return _unset(a, run_name=f"{model}-{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}")


ROLLOUT_FUNCTION = "miles.rollout.inference_rollout.InferenceRolloutFn"
BUILT_IN_ROLLOUTS = (ROLLOUT_FUNCTION, "miles.rollout.sglang_rollout.generate_rollout")
FULLY_ASYNC_FUNCTION = "miles.rollout.fully_async_rollout.FullyAsyncRolloutFn"
DATA_SOURCE = "miles.rollout.data_source.RolloutDataSourceWithBuffer"

STEPS = (
    Resolve("the device that this host has", lambda a: _unset(a, train_device="cuda" if has_gpu() else "cpu")),
    Resolve("the trainer for that device", _train_backend),
    Resolve("the engine for this host", _rollout_engine),
    Resolve("the type that the trainer computes in", _engine_type),
    Resolve("attention kernels for the device", _attention),
    Resolve("mixed precision on a GPU", _compute_type),
    Resolve("the trainer backend's default", _optimizer),
    Resolve("--load-debug-rollout-data", lambda a: {"debug_train_only": True} if a.load_debug_rollout_data else {}),
    Resolve("--dump-details", _dump_details),
    Resolve("--colocate: engines use the trainer's devices", _colocated_gpus),
    Resolve("the engines that are named", _engine_devices),
    Resolve("whether trainer and engines share devices", _offload),
    Resolve("--colocate: engines can read the trainer's device memory", _transport),
    Resolve("--ci-test", _weight_check),
    Resolve("replay of rollout data needs replay", _replay),
    Resolve("the rollout's samples over the steps", _global_batch_size),
    Resolve("the rollout's samples over --global-batch-size", _num_steps),
    Resolve("--rollout-batch-size", lambda a: _unset(a, over_sampling_batch_size=a.rollout_batch_size)),
    Resolve("--rollout-max-context-len minus one token to generate", _prompt_len),
    Resolve("--eps-clip", lambda a: _unset(a, eps_clip_high=a.eps_clip)),
    Resolve(
        "--tensor-model-parallel-size", lambda a: _unset(a, expert_tensor_parallel_size=a.tensor_model_parallel_size)
    ),
    Resolve(
        "the kind of rollout",
        lambda a: _unset(
            a,
            rollout_function_path=FULLY_ASYNC_FUNCTION if a.fully_async else ROLLOUT_FUNCTION,
            rollout_submission_granularity="sample" if a.fully_async else "group",
            data_source_path=DATA_SOURCE,
        ),
    ),
    Resolve("the rollout's own setting", _eval_from_rollout),
    Resolve("a dataset without a name", _eval_pairs),
    Resolve("no checkpoint is there yet: a fresh start", _fresh_start),
    Resolve("--hf-checkpoint", _reference),
    Resolve("the actor's setting", _critic),
    Resolve("the model and the time", _run_name),
    Resolve("--run-name", lambda a: _unset(a, run_dir=str(Path("runs") / a.run_name))),
    Resolve("the same folder for every process", _absolute),
)
