"""Modes, drivers, devices, engines, evaluation."""

from __future__ import annotations

import os

from miles.arguments.args import Args
from miles.arguments.devices import has_gpu
from miles.arguments.resolve import ROLLOUT_FUNCTION
from miles.arguments.rules.conflict import Clash, excludes
from miles.arguments.rules.rule import Rule, about
from miles.arguments.systems import missing, works


def _engines_run(a: Args) -> bool:
    return not a.debug_train_only


def _actor_gpus(a: Args) -> int:
    return a.actor_num_nodes * a.actor_num_gpus_per_node


def _ranks_beyond_two(a: Args) -> bool:
    return _actor_gpus(a) > 1 or (a.rollout_num_gpus or 0) > 1


MODES = (
    Rule(
        "one-half-of-a-run",
        lambda a: a.debug_rollout_only and (a.debug_train_only or a.load_debug_rollout_data is not None),
        "--debug-rollout-only starts no trainer; --debug-train-only and --load-debug-rollout-data start no engines: drop one of them",
    ),
    Rule(
        "train-only-needs-data",
        lambda a: (
            a.debug_train_only and a.load_debug_rollout_data is None and a.rollout_function_path == ROLLOUT_FUNCTION
        ),
        "--debug-train-only starts no engines, and the default rollout function needs them: set --load-debug-rollout-data, or a "
        "--rollout-function-path without engines (for SFT miles.rollout.sft_rollout.generate_rollout)",
    ),
    Rule(
        "train-only-cannot-evaluate",
        lambda a: a.debug_train_only and a.eval_interval is not None,
        "--eval-interval needs engines, and --debug-train-only (or --load-debug-rollout-data) starts none: drop one of them",
    ),
    Rule(
        "zero-rollouts-evaluate",
        lambda a: a.num_rollout == 0 and a.eval_interval is None,
        "--num-rollout 0 only evaluates: set --eval-interval and --eval-prompt-data, or raise --num-rollout",
    ),
    Rule(
        "sync-driver-updates-every-rollout",
        lambda a: a.driver == "train.py" and a.update_weights_interval != 1,
        "--update-weights-interval {update_weights_interval} is read by train_async.py only; train.py updates after every rollout",
    ),
    Rule(
        "async-driver-has-own-devices",
        lambda a: a.driver == "train_async.py" and a.colocate,
        "train_async.py generates while it trains, so --colocate cannot work: drop it, or run train.py",
    ),
    Rule(
        "fault-components",
        lambda a: a.use_fault_tolerance and not a.ft_components,
        "--use-fault-tolerance watches nothing with an empty --ft-components: leave that out",
    ),
)

FULLY_ASYNC = about(
    "fully-async",
    excludes(
        "fully-async-alone",
        "--fully-async",
        lambda a: a.fully_async,
        Clash("the driver train.py (run train_async.py)", lambda a: a.driver == "train.py"),
        Clash("--rollout-function-path", lambda a: "rollout_function_path" in a.given),
        Clash("--colocate", lambda a: a.colocate),
        Clash("--partial-rollout", lambda a: a.partial_rollout),
        Clash("--pause-generation-mode abort", lambda a: a.pause_generation_mode == "abort"),
        Clash("--recompute-logprobs-via-prefill", lambda a: a.recompute_logprobs_via_prefill),
        Clash("--rollout-all-samples-process-path", lambda a: a.rollout_all_samples_process_path is not None),
        Clash("--multi-lora-n-adapters", lambda a: a.multi_lora_n_adapters > 0),
    ),
    Rule(
        "async-concurrency",
        lambda a: (
            a.async_max_concurrent_samples is not None and a.async_max_concurrent_samples < a.n_samples_per_prompt
        ),
        "--async-max-concurrent-samples {async_max_concurrent_samples} does not hold one group of --n-samples-per-prompt "
        "{n_samples_per_prompt}",
    ),
    Rule(
        "async-buffer-holds-a-group",
        lambda a: (
            a.fully_async and a.rollout_batch_size and a.async_data_buffer_capacity_factor * a.rollout_batch_size < 1
        ),
        "--async-data-buffer-capacity-factor {async_data_buffer_capacity_factor} x --rollout-batch-size {rollout_batch_size} is below one group",
    ),
)

DEVICES = (
    Rule(
        "rollout-devices",
        lambda a: _engines_run(a) and not a.rollout_num_gpus,
        "set --rollout-num-gpus: the GPUs (or, without GPUs, the engine ranks) of the engines",
    ),
    Rule(
        "colocated-size",
        lambda a: a.colocate and "rollout_num_gpus" in a.given and a.given_value("rollout_num_gpus") != _actor_gpus(a),
        lambda a: (
            f"--colocate gives the engines the trainer's {_actor_gpus(a)} devices, so --rollout-num-gpus "
            f"{a.given_value('rollout_num_gpus')} has no effect: drop it, or drop --colocate"
        ),
    ),
    Rule(
        "offload-takes-turns",
        lambda a: (a.offload_train or a.offload_rollout) and a.driver == "train_async.py",
        "train_async.py generates while it trains, so neither side can give its memory to the other: drop --offload-train and "
        "--offload-rollout",
    ),
    Rule(
        "released-weights-come-back",
        lambda a: a.offload_rollout and "weight" in a.offload_rollout_level and a.debug_skip_weight_update,
        "engines that release their weights get them back by an update, and --debug-skip-weight-update makes none: set "
        "--offload-rollout-level kv_cache",
    ),
    Rule(
        "part-of-a-gpu",
        lambda a: a.gpus_per_rank < 1 and (a.train_device != "cuda" or a.colocate or _ranks_beyond_two(a)),
        "--gpus-per-rank {gpus_per_rank} is for one trainer rank and one engine that share a GPU, each with its own part of it (NCCL "
        "refuses two ranks of one group on one GPU): set --actor-num-nodes 1, --actor-num-gpus-per-node 1 and --rollout-num-gpus 1, "
        "without --colocate and on GPUs, or drop it",
    ),
    Rule(
        "engines-divide",
        lambda a: (
            _engines_run(a)
            and bool(a.rollout_num_gpus)
            and a.sglang_config is None
            and a.rollout_num_gpus % a.rollout_num_gpus_per_engine != 0
        ),
        "--rollout-num-gpus {rollout_num_gpus} is not a multiple of --rollout-num-gpus-per-engine {rollout_num_gpus_per_engine}",
    ),
    Rule(
        "embedded-engine-size",
        lambda a: a.rollout_engine == "embedded" and a.rollout_num_gpus_per_engine > 1,
        "an embedded engine uses one device: set --rollout-num-gpus-per-engine 1 (with --rollout-num-gpus {rollout_num_gpus} there "
        "are then {rollout_num_gpus} engines)",
    ),
    Rule(
        "deterministic-gpus",
        lambda a: a.deterministic_mode and a.train_device == "cuda" and not works("true-on-policy"),
        lambda a: missing("true-on-policy", "--deterministic-mode on GPUs"),
    ),
    Rule(
        "gpu-is-there",
        lambda a: a.train_device == "cuda" and not has_gpu() and not os.environ.get("RAY_ADDRESS"),
        "--train-device cuda, but torch sees no GPU on this host: set --train-device cpu, or RAY_ADDRESS to a cluster that has GPUs",
    ),
)

FILES = (
    Rule(
        "sentinel-needs-a-save",
        lambda a: a.save_trigger_sentinel is not None and not (a.save or a.save_hf),
        "--save-trigger-sentinel asks for checkpoints: set --save (or --save-hf)",
    ),
    Rule(
        "eval-group-rewards",
        lambda a: a.eval_interval is not None and a.group_rm,
        "--group-rm scores groups, which evaluation does not have: drop it, or drop --eval-interval",
    ),
    Rule(
        "one-eval-source",
        lambda a: a.eval_config is not None and a.eval_prompt_data is not None,
        "--eval-config replaces --eval-prompt-data: give one of them",
    ),
    Rule(
        "eval-needs-data",
        lambda a: (
            a.eval_interval is not None
            and not (
                a.eval_config
                or a.eval_prompt_data
                or "eval_function_path" in a.given
                or "rollout_function_path" in a.given
            )
        ),
        "--eval-interval needs something to evaluate on: set --eval-prompt-data or --eval-config",
    ),
)

RULES = (*MODES, *FULLY_ASYNC, *DEVICES, *FILES)
