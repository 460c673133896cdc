"""Differences between the engine's and the trainer's policy: corrections, and replay of the engine's choices."""

from __future__ import annotations

from miles.arguments.flag import flag, group


@group("Train-rollout mismatch")
class MismatchArgs:
    use_tis: bool = flag(
        False, "Truncated importance sampling: weight tokens by trainer over engine probability.", owner="policy-loss"
    )
    tis_clip: float = flag(2.0, "Upper bound of the weights.", gt=0, owner="tis")
    tis_clip_low: float = flag(0.0, "Lower bound of the weights.", ge=0, owner="tis")
    custom_tis_function_path: str | None = flag(
        None, "Replaces the correction: keyword arguments in, (pg_loss, masks, metrics) out.", hook="tis", owner="tis"
    )
    get_mismatch_metrics: bool = flag(False, "Run --custom-tis-function-path for its metrics, without --use-tis.")
    use_rollout_logprobs: bool = flag(
        False, "Take the engine's log-probs as the old policy in the ratio.", owner="policy-loss"
    )
    skip_actor_forward_only: bool = flag(
        False,
        "One step a rollout: take the training pass itself as the old policy and skip the scoring pass.",
        system="megatron",
    )
    use_routing_replay: bool = flag(False, "Replay the scoring pass's expert choices in training.", system="replay")
    use_rollout_routing_replay: bool = flag(
        False, "Replay the engine's expert choices in the trainer (R3).", system="replay"
    )
    use_indexer_replay: bool = flag(False, "Replay sparse-attention indices of the scoring pass.", system="replay")
    use_rollout_indexer_replay: bool = flag(False, "Replay the engine's sparse-attention indices.", system="replay")
