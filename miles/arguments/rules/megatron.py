"""What the Megatron trainer can and cannot combine: memory, replay, critic, fault tolerance."""

from __future__ import annotations

from miles.arguments.args import Args
from miles.arguments.rules.adapters import FT_TRAINER
from miles.arguments.rules.conflict import Clash, excludes, requires
from miles.arguments.rules.rule import Rule, about

MEGATRON = Clash("--train-backend megatron", lambda a: a.train_backend == "megatron")
FSDP = Clash("--train-backend fsdp", lambda a: a.train_backend == "fsdp")
INDEP_DP = Clash("--indep-dp", lambda a: a.indep_dp)
LORA = Clash("--lora-rank", lambda a: a.lora_rank > 0)
KEEP_OLD_ACTOR = Clash("--keep-old-actor", lambda a: a.keep_old_actor)
CPU_OPTIMIZER = Clash("--optimizer-cpu-offload", lambda a: a.optimizer_cpu_offload)
PRECISION_AWARE = Clash("--use-precision-aware-optimizer", lambda a: a.use_precision_aware_optimizer)


def _streams(a: Args) -> bool:
    return a.stream_optimizer_state_to_disk


def _rebuilds(a: Args) -> bool:
    return a.rematerialize_param_from_master_weight and not a.debug_train_only


def _critic(a: Args) -> bool:
    return a.advantage_estimator == "ppo"


def _skips(a: Args) -> bool:
    return a.skip_actor_forward_only


def _any_dropout(a: Args) -> bool:
    return bool(a.attention_dropout or a.hidden_dropout or a.lora_dropout)


def _random_routing(a: Args) -> bool:
    sinkhorn = "sinkhorn" in (a.moe_router_load_balancing_type or [])
    return bool(a.moe_input_jitter_eps or a.moe_router_force_load_balancing or a.moe_router_force_biased or sinkhorn)


def _ranks(a: Args) -> int:
    return a.actor_num_nodes * a.actor_num_gpus_per_node


def _model_ranks(a: Args) -> int:
    return a.tensor_model_parallel_size * a.pipeline_model_parallel_size * a.context_parallel_size


MEMORY = about(
    "offload-disk",
    requires(
        "disk-offload-needs",
        "--offload-train-target disk",
        lambda a: a.offload_train_target == "disk",
        Clash("--offload-train", lambda a: a.offload_train),
        MEGATRON,
    ),
    requires(
        "streaming-needs",
        "--stream-optimizer-state-to-disk",
        _streams,
        Clash("--offload-train-target disk", lambda a: a.offload_train_target == "disk" or not a.offload_train),
        Clash("--optimizer adam", lambda a: a.optimizer == "adam"),
    ),
    excludes(
        "streaming-alone",
        "--stream-optimizer-state-to-disk",
        _streams,
        INDEP_DP,
        LORA,
        CPU_OPTIMIZER,
        Clash("--offload-optimizer-states", lambda a: a.offload_optimizer_states),
        PRECISION_AWARE,
        Clash("--reset-optimizer-states", lambda a: a.reset_optimizer_states),
        Clash("--save-local-weight-checksum", lambda a: a.save_local_weight_checksum),
        Clash("--enable-witness", lambda a: a.enable_witness),
    ),
    requires(
        "rebuilding-needs",
        "--rematerialize-param-from-master-weight",
        _rebuilds,
        MEGATRON,
        Clash("--colocate", lambda a: a.colocate),
        Clash("--offload-train", lambda a: a.offload_train),
        Clash("--offload-train-target cpu", lambda a: a.offload_train_target == "cpu"),
        Clash("computed advantages", lambda a: a.compute_advantages_and_returns),
    ),
    excludes(
        "rebuilding-alone",
        "--rematerialize-param-from-master-weight",
        _rebuilds,
        LORA,
        Clash("--debug-disable-optimizer", lambda a: a.debug_disable_optimizer),
        INDEP_DP,
        KEEP_OLD_ACTOR,
        Clash("--overlap-param-gather", lambda a: a.overlap_param_gather),
        Clash("--num-critic-only-steps", lambda a: a.num_critic_only_steps > 0),
        Clash(
            "--use-precision-aware-optimizer without --optimizer-cpu-offload",
            lambda a: a.use_precision_aware_optimizer and not a.optimizer_cpu_offload,
        ),
    ),
)

SCORING = about(
    "megatron",
    requires(
        "skipping-needs",
        "--skip-actor-forward-only",
        _skips,
        MEGATRON,
        Clash("--loss-type policy_loss", lambda a: a.loss_type == "policy_loss"),
        Clash("computed advantages", lambda a: a.compute_advantages_and_returns),
        Clash("one optimizer step a rollout (--num-steps-per-rollout 1)", lambda a: a.num_steps_per_rollout == 1),
    ),
    excludes(
        "skipping-alone",
        "--skip-actor-forward-only",
        _skips,
        KEEP_OLD_ACTOR,
        Clash("--kl-coef", lambda a: a.kl_coef != 0),
        Clash("--use-opd", lambda a: a.use_opd),
        Clash("dropout", _any_dropout),
        Clash("random routing (jitter, forced or sinkhorn balancing)", _random_routing),
        Clash("--use-rollout-entropy", lambda a: a.use_rollout_entropy),
        Clash("--true-on-policy-mode", lambda a: a.true_on_policy_mode),
        Clash("--log-correct-samples", lambda a: a.log_correct_samples),
        Clash("--rollout-data-postprocess-path", lambda a: a.rollout_data_postprocess_path),
        Clash("--custom-megatron-before-log-prob-hook-path", lambda a: a.custom_megatron_before_log_prob_hook_path),
        Clash("--custom-megatron-before-train-step-hook-path", lambda a: a.custom_megatron_before_train_step_hook_path),
        Clash("--custom-model-provider-path", lambda a: a.custom_model_provider_path),
        Clash("--dumper-source-patcher-config-train", lambda a: a.dumper_source_patcher_config_train),
        Clash("--save-debug-train-data", lambda a: a.save_debug_train_data and not a.dump_details),
        Clash(
            "replay that the scoring pass records (use the rollout's)",
            lambda a: (
                (a.use_routing_replay and not a.use_rollout_routing_replay)
                or (a.use_indexer_replay and not a.use_rollout_indexer_replay)
            ),
        ),
    ),
    Rule(
        "indexer-replay-layout",
        lambda a: a.use_indexer_replay and a.context_parallel_size > 1,
        "indexer replay needs --context-parallel-size 1, not {context_parallel_size}",
    ),
)

CRITIC = about(
    "critic",
    requires("critic-needs", "--advantage-estimator ppo", _critic, FSDP),
    excludes(
        "critic-alone",
        "--advantage-estimator ppo",
        _critic,
        Clash("--kl-coef", lambda a: a.kl_coef != 0),
        FT_TRAINER,
    ),
    Rule(
        "critic-size",
        lambda a: (
            _critic(a)
            and (a.critic_num_nodes, a.critic_num_gpus_per_node) != (a.actor_num_nodes, a.actor_num_gpus_per_node)
        ),
        "the critic shares the actor's devices: leave out --critic-num-nodes and --critic-num-gpus-per-node, or set them to "
        "{actor_num_nodes} and {actor_num_gpus_per_node}",
    ),
)

MODEL = about(
    "megatron",
    Rule(
        "stage-layers-need-stages",
        lambda a: (
            a.pipeline_model_parallel_size == 1
            and (a.decoder_first_pipeline_num_layers or a.decoder_last_pipeline_num_layers)
        ),
        "--decoder-first-pipeline-num-layers and --decoder-last-pipeline-num-layers have no effect with --pipeline-model-parallel-size 1",
    ),
    Rule(
        "layout-divides-the-ranks",
        lambda a: a.train_backend == "megatron" and _ranks(a) % _model_ranks(a) != 0,
        lambda a: (
            f"--tensor-model-parallel-size x --pipeline-model-parallel-size x --context-parallel-size = {_model_ranks(a)} "
            f"does not divide the {_ranks(a)} trainer ranks"
        ),
    ),
    requires(
        "mtp-needs-layers",
        "--enable-mtp-training",
        lambda a: a.enable_mtp_training,
        Clash("--mtp-num-layers", lambda a: a.mtp_num_layers),
    ),
    requires("indep-dp-needs", "--indep-dp", lambda a: a.indep_dp, MEGATRON),
    requires(
        "post-save-hook-needs-saves",
        "--custom-megatron-post-save-hook-path",
        lambda a: a.custom_megatron_post_save_hook_path is not None,
        Clash("--save", lambda a: a.save),
    ),
)

FAULTS = about(
    "ft-trainer",
    requires(
        "controller-needs-a-server",
        "--mini-ft-controller-enable",
        lambda a: a.mini_ft_controller_enable,
        Clash("--control-server-port", lambda a: a.control_server_port > 0),
    ),
)


RULES = (*MEMORY, *SCORING, *CRITIC, *MODEL, *FAULTS)
