"""Switches that other flags depend on: without its owner, a flag would have no effect, and that is an error."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from miles.arguments.args import Args
from miles.arguments.resolve import BUILT_IN_ROLLOUTS


@dataclass(frozen=True)
class Owner:
    """`turn_on` is what to set; `is_on` whether it is."""

    turn_on: str
    is_on: Callable[[Args], bool]


def _cuts_groups_off(a: Args) -> bool:
    """Whether a full batch may leave groups unfinished: the built-in rollout asks for no more than it needs otherwise."""
    own = a.rollout_function_path not in BUILT_IN_ROLLOUTS
    return own or (a.over_sampling_batch_size or 0) > (a.rollout_batch_size or 0)


OWNERS: dict[str, Owner] = {
    "megatron": Owner("--train-backend megatron", lambda a: a.train_backend == "megatron"),
    "fsdp": Owner("--train-backend fsdp", lambda a: a.train_backend == "fsdp"),
    "sglang": Owner("--rollout-engine sglang", lambda a: a.rollout_engine not in (None, "embedded")),
    "embedded": Owner("--rollout-engine embedded", lambda a: a.rollout_engine == "embedded"),
    "offload-train": Owner("--offload-train", lambda a: bool(a.offload_train)),
    "offload-rollout": Owner("--offload-rollout", lambda a: bool(a.offload_rollout)),
    "offload-disk": Owner(
        "--offload-train-target disk",
        lambda a: a.offload_train_target == "disk" or a.stream_optimizer_state_to_disk,
    ),
    "reference": Owner("--use-kl-loss or --kl-coef", lambda a: a.use_kl_loss or a.kl_coef != 0),
    "save": Owner("--save", lambda a: a.save is not None),
    "save-any": Owner("--save or --save-hf", lambda a: a.save is not None or a.save_hf is not None),
    "load": Owner("--load", lambda a: a.load is not None or "load" in a.derived),
    "over-sampling": Owner("--over-sampling-batch-size above --rollout-batch-size", _cuts_groups_off),
    "partial-rollout": Owner("--partial-rollout", lambda a: a.partial_rollout),
    "fully-async": Owner("--fully-async", lambda a: a.fully_async),
    "check-weight-update": Owner("--check-weight-update-equal", lambda a: a.check_weight_update_equal),
    "disk-delta": Owner(
        "--update-weight-transfer-mode disk-delta", lambda a: a.update_weight_transfer_mode == "disk-delta"
    ),
    "p2p": Owner("--update-weight-transfer-mode p2p", lambda a: a.update_weight_transfer_mode == "p2p"),
    "lora": Owner("--lora-rank", lambda a: a.lora_rank > 0 or a.lora_adapter_path is not None),
    "multi-lora": Owner("--multi-lora-n-adapters", lambda a: a.multi_lora_n_adapters > 0),
    "sft": Owner("--loss-type sft_loss", lambda a: a.loss_type == "sft_loss"),
    "dynamic-batch": Owner("--use-dynamic-batch-size", lambda a: a.use_dynamic_batch_size),
    "eval": Owner("--eval-interval", lambda a: a.eval_interval is not None),
    "custom-loss": Owner("--loss-type custom_loss", lambda a: a.loss_type == "custom_loss"),
    "policy-loss": Owner("--loss-type policy_loss", lambda a: a.loss_type in ("policy_loss", "custom_loss")),
    "kl-loss": Owner("--use-kl-loss", lambda a: a.use_kl_loss),
    "discounted": Owner(
        "--advantage-estimator reinforce_plus_plus or ppo",
        lambda a: a.advantage_estimator in ("reinforce_plus_plus", "ppo"),
    ),
    "critic": Owner("--advantage-estimator ppo", lambda a: a.advantage_estimator == "ppo"),
    "opsm": Owner("--use-opsm", lambda a: a.use_opsm),
    "tis": Owner("--use-tis or --get-mismatch-metrics", lambda a: a.use_tis or a.get_mismatch_metrics),
    "opd": Owner("--use-opd", lambda a: a.use_opd),
    "wandb": Owner("--use-wandb", lambda a: a.use_wandb),
    "tensorboard": Owner("--use-tensorboard", lambda a: a.use_tensorboard),
    "mlflow": Owner("--use-mlflow", lambda a: a.use_mlflow),
    "prometheus": Owner("--use-prometheus", lambda a: a.use_prometheus),
    "dashboard": Owner("--use-miles-dashboard", lambda a: a.use_miles_dashboard),
    "load-debug-data": Owner("--load-debug-rollout-data", lambda a: a.load_debug_rollout_data is not None),
    "ci-test": Owner("--ci-test", lambda a: a.ci_test),
    "fault-tolerance": Owner("--use-fault-tolerance", lambda a: a.use_fault_tolerance),
    "router": Owner("--use-miles-router", lambda a: a.use_miles_router),
    "sessions": Owner("--use-session-server", lambda a: a.use_session_server is not None),
    "tree-sessions": Owner("--use-session-server v2", lambda a: a.use_session_server == "v2"),
    "agent": Owner("--custom-agent-function-path", lambda a: a.custom_agent_function_path is not None),
    "wsd": Owner("--lr-decay-style WSD", lambda a: a.lr_decay_style == "WSD"),
    "chat-template": Owner("--apply-chat-template", lambda a: a.apply_chat_template),
}
