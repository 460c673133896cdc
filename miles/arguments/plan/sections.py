"""The parts of a plan, each from the resolved arguments alone."""

from __future__ import annotations

from collections import Counter
from typing import Any

from miles.arguments.args import ALL_FLAGS, FLAGS, SECRETS, Args
from miles.arguments.rules.architecture import read_config
from miles.backends.engine_api.topology import REGULAR, EngineSpec, plan_engines
from miles.backends.training_utils.checkpoint import resolve_load

Section = dict[str, Any]


def run(a: Args) -> Section:
    config = read_config(a.hf_checkpoint)
    names = ("model_type", "num_hidden_layers", "hidden_size", "vocab_size")
    return {
        "name": a.run_name,
        "folder": a.run_dir,
        "driver": a.driver or "none",
        "model": a.hf_checkpoint,
        "architecture": ", ".join(f"{n} {config[n]}" for n in names if n in config) or "unknown",
        "rollouts": rollouts(a),
        "seeds": f"trainer {a.seed}, rollout {a.rollout_seed}",
    }


def rollouts(a: Args) -> str:
    """How many there are, and where a resumed run goes on."""
    total = f"{a.num_rollout}" if a.num_rollout is not None else f"{a.num_epoch} epochs of the data"
    found = None if a.debug_rollout_only or a.finetune else resolve_load(a.load, a.ckpt_step)
    first = a.start_rollout_id if a.start_rollout_id is not None else found[1] + 1 if found else 0
    if found is None and first == 0:
        return total
    if a.num_rollout is not None and first >= a.num_rollout:
        return f"{total}, all done: raise --num-rollout to go on"
    return f"{total}, goes on with rollout {first} (the first is 0)"


def trainer_ranks(a: Args) -> int:
    return 0 if a.debug_rollout_only else a.actor_num_nodes * a.actor_num_gpus_per_node


def engine_ranks(a: Args) -> int:
    return 0 if a.debug_train_only else (a.rollout_num_gpus or 0)


def placement(a: Args) -> Section:
    """Which process gets which device. Bundles are numbered trainer first, then rollout, then evaluation."""
    ranks, engines = trainer_ranks(a), plan_engines(a)
    gpus = a.train_device == "cuda"
    unit = "GPU" if gpus else "CPU"
    first = 0 if a.colocate else ranks
    processes = {"driver": "no device", "rollout manager": "no device"}
    if ranks and engines:
        processes["weight update coordinator"] = "no device"
    for rank in range(ranks):
        threads = "" if gpus else f", {a.actor_cpus_per_rank} thread{'s' if a.actor_cpus_per_rank > 1 else ''}"
        processes[f"trainer rank {rank}"] = f"{unit} bundle {rank}{threads}"
    for spec in engines:
        processes[f"engine {spec.index}"] = _engine_place(a, spec, first, unit)
    taken = 0 if a.rollout_external else engine_ranks(a)
    own = max(ranks, taken) if a.colocate else ranks + taken
    return {"needs": f"{own + a.eval_num_gpus} {unit}s", "processes": processes}


def _engine_place(a: Args, spec: EngineSpec, first: int, unit: str) -> str:
    if spec.address is not None:
        return f"runs already at {spec.address}"
    start = first + spec.offset
    last = start + spec.devices - 1
    bundles = f"bundle {start}" if start == last else f"bundles {start} to {last}"
    shared = ", shared with the trainer" if a.colocate and trainer_ranks(a) else ""
    parts = str(spec).partition(", ")[2]
    return f"{unit} {bundles}{shared}" + (f", {parts}" if parts else "")


def batch(a: Args) -> Section:
    samples, steps = a.rollout_batch_size * a.n_samples_per_prompt, a.num_steps_per_rollout
    size = a.global_batch_size
    section: Section = {
        "equation": f"{a.rollout_batch_size} prompts x {a.n_samples_per_prompt} samples = {samples} = "
        f"{size} a step x {steps} step{'s' if steps != 1 else ''}"
    }
    if a.use_dynamic_global_batch_size:
        section["equation"] = (
            f"{a.rollout_batch_size} prompts x {a.n_samples_per_prompt} samples, one step of what arrives"
        )
    if not a.debug_rollout_only:
        section["micro-batches"] = (
            f"up to {a.max_tokens_per_gpu} tokens on a rank"
            if a.use_dynamic_batch_size
            else f"{a.micro_batch_size} samples"
        )
    if a.over_sampling_batch_size != a.rollout_batch_size:
        section["over-sampling"] = f"{a.over_sampling_batch_size} groups asked for at a time"
    return section


def trainer(a: Args) -> Section:
    if a.debug_rollout_only:
        return {"trainer": "none (--debug-rollout-only)"}
    world = trainer_ranks(a)
    precision = "bfloat16" if a.bf16 else "float16" if a.fp16 else "float32"
    section: Section = {
        "backend": a.train_backend,
        "layout": _layout(a, world),
        "precision": f"compute {precision}, master weights {'float32' if a.keep_fp32_master else precision}",
        "loss": _loss(a),
        "optimizer": f"{a.optimizer}, lr {a.lr:g} {a.lr_decay_style}, weight decay {a.weight_decay:g}, clip {a.clip_grad:g}",
        "start": f"resume from {a.load}" if a.load else f"fresh from {a.hf_checkpoint}",
    }
    if a.use_kl_loss or a.kl_coef:
        section["reference"] = a.ref_load
    return section


def _layout(a: Args, world: int) -> str:
    if a.train_backend == "fsdp":
        shards = world // a.dp_replicate_size
        return f"data parallel {world}: {a.dp_replicate_size} replica(s), each sharded over {shards} rank(s)"
    sizes = {
        "tensor": a.tensor_model_parallel_size,
        "pipeline": a.pipeline_model_parallel_size,
        "context": a.context_parallel_size,
    }
    model = a.tensor_model_parallel_size * a.pipeline_model_parallel_size * a.context_parallel_size
    parts = [f"{name} {size}" for name, size in sizes.items()]
    if a.sequence_parallel and a.tensor_model_parallel_size > 1:
        parts[0] += " with sequence parallelism"
    if virtual := a.num_virtual_stages_per_pipeline_rank or a.num_layers_per_virtual_pipeline_stage:
        unit = "virtual stages a rank" if a.num_virtual_stages_per_pipeline_rank else "layers a virtual stage"
        parts[1] += f" ({virtual} {unit})"
    parts.append(f"data {world // model}" + (" with a distributed optimizer" if a.use_distributed_optimizer else ""))
    if a.expert_model_parallel_size > 1:
        parts.append(f"experts over {a.expert_model_parallel_size}, each cut into {a.expert_tensor_parallel_size}")
    if a.recompute_granularity:
        parts.append(f"{a.recompute_granularity} recomputation")
    return ", ".join(parts)


def _loss(a: Args) -> str:
    if a.loss_type != "policy_loss":
        return a.loss_type
    parts = [f"{a.advantage_estimator}, clip {a.eps_clip:g}/{a.eps_clip_high:g}"]
    if a.use_kl_loss:
        parts.append(f"KL {a.kl_loss_type} x {a.kl_loss_coef:g}")
    if a.kl_coef:
        parts.append(f"KL {a.kl_loss_type} x {a.kl_coef:g} in the reward")
    if a.entropy_coef:
        parts.append(f"entropy x {a.entropy_coef:g}")
    return ", ".join(parts) + (", every token alike" if a.calculate_per_token_loss else ", every trajectory alike")


def rollout(a: Args) -> Section:
    if a.debug_train_only:
        source = a.load_debug_rollout_data or a.rollout_function_path
        return {"engine": "none", "data": source}
    return {
        "engine": _engines(a),
        "concurrency": f"{a.sglang_server_concurrency} requests an engine",
        "sampling": f"temperature {a.rollout_temperature:g}, top-p {a.rollout_top_p:g}, top-k {a.rollout_top_k}",
        "lengths": f"prompt {_limit(a.rollout_max_prompt_len)}, response {_limit(a.rollout_max_response_len)}, "
        f"context {_limit(a.rollout_max_context_len)}",
        "reward": a.custom_rm_path or a.rm_type or "named by each prompt's metadata",
        "retries": f"{a.max_sample_retries} a sample; the run stops when more than {a.max_failed_group_ratio:.0%} of groups fail",
    }


def _engines(a: Args) -> str:
    counts = Counter((s.devices, s.kind, s.model) for s in plan_engines(a))
    if a.rollout_external:
        return f"{counts.total()} that run already"
    return "; ".join(
        f"{count} x {a.rollout_engine}, {devices} device(s) each"
        + (f", {kind}" if kind != REGULAR else "")
        + (f", model {model}" if model != "actor" else "")
        for (devices, kind, model), count in counts.items()
    )


def _limit(tokens: int | None) -> str:
    return "unlimited" if tokens is None else f"{tokens} tokens"


def weight_update(a: Args) -> Section:
    if a.debug_rollout_only or a.debug_train_only or a.debug_skip_weight_update:
        return {"updates": "none: engines and trainer do not meet in this run"}
    interval = a.update_weights_interval
    return {
        "transport": a.update_weight_transfer_mode,
        "when": "once before the first rollout, then after every "
        + ("rollout" if interval == 1 else f"{interval} rollouts"),
        "buckets": f"{a.update_weight_buffer_size / 2**20:g} MiB",
        "requests in flight": a.pause_generation_mode,
        "verification": "digest of every tensor on every engine" if a.verify_weight_update else "off",
        "preflight": "noise, update, compare" if a.check_weight_update_equal else "off",
        "deadline": f"{a.weight_update_timeout:g} s",
    }


def evaluation(a: Args) -> Section:
    if a.eval_interval is None:
        return {"evaluation": "none"}
    pairs = a.eval_prompt_data or []
    return {
        "when": f"every {a.eval_interval} rollouts" + ("" if a.skip_eval_before_train else ", and before the first"),
        "data": a.eval_config or ", ".join(f"{n} ({f})" for n, f in zip(pairs[::2], pairs[1::2], strict=False)),
        "samples": f"{a.n_samples_per_eval_prompt} a prompt, temperature {a.eval_temperature:g}",
        "engines": f"{a.eval_num_gpus} of its own" if a.eval_num_gpus else "those of the rollout",
    }


def hooks(a: Args) -> Section:
    """Import paths in use, given or not."""
    used = {f.option: getattr(a, n) for n, f in FLAGS.items() if f.hook is not None and getattr(a, n) is not None}
    if a.eval_interval is None:
        used.pop("--eval-function-path", None)
    return used


def files(a: Args) -> Section:
    reads = {
        "model": a.hf_checkpoint,
        "prompts": a.prompt_data,
        "checkpoint": a.load,
        "rollout data": a.load_debug_rollout_data,
    }
    writes = {
        "run folder": a.run_dir,
        "checkpoints": a.save
        and f"{a.save}" + (f" every {a.save_interval} rollouts" if a.save_interval else " on demand"),
        "Hugging Face export": a.save_hf,
        "rollout data": a.save_debug_rollout_data,
        "training data": a.save_debug_train_data,
        "trajectories": a.save_debug_trajectory_data,
    }
    return {
        "read": {name: path for name, path in reads.items() if path},
        "written": {name: path for name, path in writes.items() if path},
    }


def given(a: Args) -> Section:
    """Flags that were set, by option; secrets without their value."""
    return {
        ALL_FLAGS[n].option: "(hidden)" if n in SECRETS else getattr(a, n) for n in sorted(a.given) if n in ALL_FLAGS
    }


def warnings(a: Args) -> list[str]:
    return list(a.warnings)
