"""What each of the four promises between engines and trainer amounts to in one run."""

from __future__ import annotations

from typing import Any

from miles.arguments.args import Args
from miles.arguments.rules.architecture import CONFIG, read_config


def describe(a: Args) -> dict[str, dict[str, str]]:
    """For each contract: how it is kept (or that it is only measured), and the metric that shows it."""
    if a.debug_train_only and not a.load_debug_rollout_data:
        text = {"kept by": "nothing to keep: no engine takes part", "evidence": "none"}
        return {name: text for name in ("same tokens", "same routes", "same log-probs", "same weight version")}
    return {
        "same tokens": _tokens(a),
        "same routes": _routes(a),
        "same log-probs": _log_probs(a),
        "same weight version": _weight_version(a),
    }


def _tokens(a: Args) -> dict[str, str]:
    kept = "token ids go from the engine to the loss; no text is tokenised again"
    if a.use_session_server:
        kept = "session servers own the token ids from sampling to the loss"
    elif a.custom_generate_function_path:
        kept = "the custom generate function's token ids are trained as they are; lengths and masks are checked"
    return {"kept by": kept, "evidence": "contract/token_exact_ratio"}


def _routes(a: Args) -> dict[str, str]:
    experts = CONFIG["num_experts"](read_config(a.hf_checkpoint))
    if not experts:
        return {"kept by": "a dense model: there are no routes", "evidence": "none"}
    if a.use_rollout_routing_replay:
        return {"kept by": "the engine's expert choices are replayed", "evidence": "contract/route_coverage"}
    return {
        "kept by": f"not kept: the trainer routes to its {experts} experts by itself",
        "evidence": "train/train_rollout_logprob_abs_diff shows what that costs",
    }


def _log_probs(a: Args) -> dict[str, str]:
    evidence = "train/train_rollout_logprob_abs_diff, train/train_rollout_kl"
    if a.debug_rollout_only:
        return {"kept by": "nothing to keep: no trainer takes part", "evidence": "none"}
    if a.true_on_policy_mode:
        return {"kept by": "bitwise equal kernels on both sides", "evidence": "contract/logprob_exact_ratio"}
    if a.custom_tis_function_path and a.use_tis:
        kept = f"measured, and corrected by {a.custom_tis_function_path}"
    elif a.use_tis:
        kept = f"measured, and corrected by importance weights within [{a.tis_clip_low:g}, {a.tis_clip:g}]"
    elif a.use_rollout_logprobs:
        kept = "measured; the ratio starts from the engine's log-probs"
    elif a.keep_old_actor:
        kept = "measured; the ratio starts from the weights that made the rollout, scored by the trainer"
    else:
        kept = "measured; the ratio starts from the trainer's own log-probs"
    return {"kept by": kept, "evidence": evidence}


def _weight_version(a: Args) -> dict[str, Any]:
    evidence = "rollout/weight_version/*, contract/version_coverage"
    if a.debug_rollout_only or a.debug_train_only or a.debug_skip_weight_update:
        return {"kept by": "nothing to keep: weights are not updated", "evidence": "none"}
    interval = a.update_weights_interval
    if a.fully_async:
        limit = "unlimited" if a.max_weight_staleness is None else f"at most {a.max_weight_staleness} versions"
        return {"kept by": f"a version on every token; staleness {limit}", "evidence": evidence}
    if a.driver == "train_async.py":
        behind = "one update" if interval == 1 else f"one update (each after {interval} rollouts)"
        kept = (
            f"a version on every token; a batch is generated while the one before trains, so it is at most {behind} old"
        )
    else:
        kept = "a version on every token; every rollout uses the weights of the update before it"
    if a.partial_rollout:
        kept += "; continued samples also hold tokens of earlier versions"
    return {"kept by": kept, "evidence": evidence}
