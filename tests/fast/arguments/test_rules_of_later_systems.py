"""Rules about systems that are not built: kept back until they are, and right already."""

from __future__ import annotations

import pytest

from miles.arguments import make_args, systems
from miles.arguments.rules import RULES

P2P = {"update_weight_transfer_mode": "p2p"}
DISK = {
    "update_weight_transfer_mode": "disk-delta",
    "update_weight_disk_dir": "/a",
    "update_weight_local_checkpoint_dir": "/b",
}
MEGATRON = {"train_backend": "megatron"}
OPD = {"use_opd": True, "opd_type": "sglang"}
MULTI_LORA = {"multi_lora_n_adapters": 2, "lora_rank": 8, "target_modules": "q", **MEGATRON}
FLEET = {"eval_num_gpus": 2, "eval_interval": 2, "eval_hf_dir": "/a"}
ASYNC = {"fully_async": True, "driver": "train_async.py"}
SKIP = {"skip_actor_forward_only": True, **MEGATRON}
STREAM = {"stream_optimizer_state_to_disk": True}
REBUILD = {
    "rematerialize_param_from_master_weight": True,
    "colocate": True,
    "rollout_num_gpus": None,
    "offload_train": True,
    **MEGATRON,
}
AGENTIC = {"custom_generate_function_path": "miles.rollout.generate_hub.agentic_tool_call.generate"}
MULTI_TURN = {"custom_generate_function_path": "miles.rollout.generate_hub.multi_turn.generate"}
EXTERNAL = {"rollout_external": True, "rollout_external_engine_addrs": ["h:1"]}
INJECT = {"ci_inject_rollout_data_path": "/a/{rollout_id}", "ci_inject_rollout_data_start_rollout_id": 1}

# rule -> flags that are fine, what breaks the rule when added, and a part of what is said
CASES = {
    "fully-async-alone": (
        ASYNC,
        {"partial_rollout": True},
        "--fully-async does not go together with --partial-rollout",
    ),
    "async-concurrency": (ASYNC, {"async_max_concurrent_samples": 1}, "does not hold one group"),
    "async-buffer-holds-a-group": (ASYNC, {"async_data_buffer_capacity_factor": 0.1}, "is below one group"),
    "p2p-alone": (P2P, {"sglang_pp_size": 2, "lora_rank": 8}, "--lora-rank, --sglang-pp-size"),
    "disk-delta-alone": (DISK, {"colocate": True, "rollout_num_gpus": None}, "does not go together with --colocate"),
    "disk-delta-folders": (DISK, {"update_weight_disk_dir": None}, "needs --update-weight-disk-dir"),
    "tree-sessions-alone": (
        {"use_session_server": "v2"},
        {"group_rm": True},
        "v2 does not go together with --group-rm",
    ),
    "sessions-survive-updates": (
        {"use_session_server": "v1"},
        {"pause_generation_mode": "abort"},
        "does not go together with --pause-generation-mode abort",
    ),
    "sessions-need-whole-engines": (
        {"use_session_server": "v1"},
        {"rollout_engine": "sglang", "prefill_num_servers": 1},
        "--use-session-server does not go together with --prefill-num-servers",
    ),
    "session-ports": ({"session_server_port": [5000, 5002]}, {"session_server_port": [2, 1]}, "takes one port"),
    "family-brings-its-template": (
        {"tito_model": "glm47", "use_session_server": "v1"},
        {"chat_template_path": "/t"},
        "--tito-model does not go together with --chat-template-path",
    ),
    "family-needs-sessions": (
        {"tito_model": "glm47", "use_session_server": "v1"},
        {"use_session_server": None},
        "--tito-model needs --use-session-server",
    ),
    "agentic-needs-an-agent": (
        {**AGENTIC, "custom_agent_function_path": "a.b", "use_session_server": "v1"},
        {"custom_agent_function_path": None},
        "needs --custom-agent-function-path",
    ),
    "agents-take-messages": (
        {**AGENTIC, "custom_agent_function_path": "a.b", "use_session_server": "v1"},
        {"apply_chat_template": True},
        "does not go together with --apply-chat-template",
    ),
    "multi-turn-needs-tools": (
        {
            **MULTI_TURN,
            "generate_execute_tool_function_path": "a.b",
            "generate_tool_specs_path": "a.c",
            "generate_tool_call_parser": "x",
        },
        {"generate_tool_specs_path": None, "generate_tool_call_parser": None},
        "needs --generate-tool-specs-path, --generate-tool-call-parser",
    ),
    "external-engines-alone": (EXTERNAL, {"prefill_num_servers": 1}, "does not go together with --prefill-num-servers"),
    "external-engines-have-addresses": (
        EXTERNAL,
        {"rollout_external_engine_addrs": None},
        "needs --rollout-external-engine-addrs",
    ),
    "addresses-are-of-external-engines": (EXTERNAL, {"rollout_external": False}, "needs --rollout-external"),
    "one-topology": ({"sglang_config": "/c"}, {"prefill_num_servers": 1}, "--sglang-config does not go together"),
    "dp-engines-share-attention": (
        {"sglang_dp_size": 2, "sglang_enable_dp_attention": True},
        {"sglang_enable_dp_attention": None},
        "needs --sglang-enable-dp-attention",
    ),
    "prefill-scores-are-exact": (
        {"recompute_logprobs_via_prefill": True, "true_on_policy_mode": True},
        {"true_on_policy_mode": False},
        "needs --true-on-policy-mode",
    ),
    "true-on-policy-precision": ({"true_on_policy_mode": True}, {"fp16": True}, "does not go together with --fp16"),
    "opd-has-a-type": (OPD, {"opd_type": None}, "--use-opd needs --opd-type"),
    "teacher-in-engines": (OPD, {"opd_teacher_load": "/t"}, "does not go together with --opd-teacher-load"),
    "teacher-in-trainer": (
        {"use_opd": True, "opd_type": "megatron"},
        {"opd_log_prob_top_k": 3},
        "does not go together with --opd-log-prob-top-k",
    ),
    "teacher-exists": (
        {"use_opd": True, "opd_type": "megatron", "opd_teacher_load": "/tmp"},
        {"opd_teacher_load": "/no"},
        "not /no",
    ),
    "teacher-addresses": (
        OPD | {"opd_teacher_urls": ["a=http://h"]},
        {"opd_teacher_urls": ["h", "b=ftp://h"]},
        "not h, b=ftp://h",
    ),
    "top-k-of-the-teacher": (
        OPD | {"opd_log_prob_top_k": 4, "opd_top_k_strategy": "only-teacher"},
        {"opd_top_k_strategy": "union"},
        "set only-teacher",
    ),
    "adapters-have-targets": (
        {"lora_rank": 8, "target_modules": "q"},
        {"target_modules": None},
        "needs --target-modules",
    ),
    "shared-outer-on-both-sides": (
        {"experts_shared_outer_loras": True, "sglang_experts_shared_outer_loras": True},
        {"experts_shared_outer_loras": False},
        "must agree",
    ),
    "multi-lora-needs": (MULTI_LORA, {"lora_rank": 0, "qkv_format": "bshd"}, "needs --lora-rank, --qkv-format thd"),
    "multi-lora-alone": (
        MULTI_LORA,
        {"pipeline_model_parallel_size": 2},
        "does not go together with --pipeline-model-parallel",
    ),
    "disk-offload-needs": (
        {"offload_train_target": "disk", "offload_train": True, **MEGATRON},
        {"offload_train": False},
        "needs --offload-train",
    ),
    "streaming-needs": (STREAM, {"offload_train": True}, "needs --offload-train-target disk"),
    "streaming-alone": (STREAM, {"reset_optimizer_states": True}, "does not go together with --reset-optimizer-states"),
    "rebuilding-needs": (REBUILD, {"colocate": False, "rollout_num_gpus": 1}, "needs --colocate"),
    "rebuilding-alone": (REBUILD, {"keep_old_actor": True}, "does not go together with --keep-old-actor"),
    "skipping-needs": (SKIP, {"num_steps_per_rollout": 2}, "needs one optimizer step a rollout"),
    "skipping-alone": (
        SKIP,
        {"hidden_dropout": 0.1, "use_routing_replay": True},
        "dropout, replay that the scoring pass records",
    ),
    "indexer-replay-layout": ({"use_indexer_replay": True}, {"context_parallel_size": 2}, "not 2"),
    "critic-needs": (
        {"advantage_estimator": "ppo"},
        MEGATRON,
        "needs --train-backend fsdp",
    ),
    "critic-alone": (
        {"advantage_estimator": "ppo"},
        {"kl_coef": 0.1},
        "does not go together with --kl-coef",
    ),
    "critic-size": ({"advantage_estimator": "ppo"}, {"critic_num_nodes": 2}, "set them to 1 and 2"),
    "stage-layers-need-stages": (
        {"pipeline_model_parallel_size": 2, "decoder_last_pipeline_num_layers": 1},
        {"pipeline_model_parallel_size": 1},
        "have no effect",
    ),
    "layout-divides-the-ranks": (
        {"tensor_model_parallel_size": 2, **MEGATRON},
        {"pipeline_model_parallel_size": 2},
        "= 4 does not divide the 2 trainer ranks",
    ),
    "mtp-needs-layers": (
        {"enable_mtp_training": True, "mtp_num_layers": 1},
        {"mtp_num_layers": None},
        "needs --mtp-num-layers",
    ),
    "indep-dp-needs": ({"indep_dp": True, **MEGATRON}, {"train_backend": "fsdp"}, "needs --train-backend megatron"),
    "post-save-hook-needs-saves": (
        {"custom_megatron_post_save_hook_path": "a.b", "save": "/tmp/x"},
        {"save": None},
        "needs --save",
    ),
    "controller-needs-a-server": (
        {"mini_ft_controller_enable": True, "control_server_port": 5000},
        {"control_server_port": 0},
        "needs --control-server-port",
    ),
    "eval-engines-divide": (FLEET, {"eval_num_gpus": 3, "eval_num_gpus_per_engine": 2}, "is not a multiple"),
    "eval-server-options-need-a-fleet": (
        FLEET | {"eval_sglang_mem_fraction_static": 0.5},
        {"eval_num_gpus": 0},
        "set --eval-num-gpus",
    ),
    "eval-fleet-needs": (FLEET, {"eval_hf_dir": None}, "needs --eval-hf-dir or --save-hf"),
    "eval-fleet-alone": (FLEET, {"debug_train_only": True}, "does not go together with --debug-train-only"),
    "eval-at-exports": (
        FLEET | {"eval_hf_dir": None, "save_hf": "/s/{rollout_id}", "save_interval": 2},
        {"save_interval": 3},
        "to be a multiple of --save-interval 3",
    ),
    "dashboard-needs-dumps": (
        {"use_miles_dashboard": True, "dump_details": "/tmp/x"},
        {"dump_details": None},
        "needs --dump-details",
    ),
    "dumper-alone": ({"dumper_enable": True}, {"save": "/tmp/x"}, "does not go together with --save"),
    "megatron-model": (MEGATRON, {"pipeline_model_parallel_size": 3}, "does not divide the 2 layers"),
    "injected-data": (INJECT, {"ci_inject_rollout_data_start_rollout_id": None}, "go together"),
}
LATER = {rule.name: rule for rule in RULES if rule.system is not None}


def found(rule, fields, **changes):
    given = {k: v for k, v in (fields | changes).items() if v is not None}
    return rule.problems(make_args(check=False, **given))


@pytest.mark.parametrize("name", CASES)
def test_the_rule_holds_without_and_breaks_with_the_change(name, fields):
    fine, change, said = CASES[name]
    rule = LATER[name]
    assert found(rule, fields, **fine) == []
    (problem,) = found(rule, fields, **(fine | change))
    assert said in problem


def test_every_rule_has_a_case():
    assert set(LATER) == set(CASES)


def test_rules_about_a_system_wait_for_it(problems, monkeypatch):
    """Until then its flags are refused as a whole, and advice on them would only mislead."""
    assert not any("needs --target-modules" in p for p in problems(lora_rank=8))
    monkeypatch.setitem(systems.SYSTEMS, "lora", ("LoRA", True))
    assert problems(lora_rank=8) == ["--lora-rank needs --target-modules"]
