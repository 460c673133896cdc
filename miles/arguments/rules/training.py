"""Losses, KL, mismatch corrections, precision, optimizer."""

from __future__ import annotations

from miles.arguments.args import Args
from miles.arguments.devices import has_package
from miles.arguments.rules.rule import Rule


def _policy(a: Args) -> bool:
    return a.loss_type == "policy_loss" and not a.debug_rollout_only


def _world_size(a: Args) -> int:
    return a.actor_num_nodes * a.actor_num_gpus_per_node


RULES = (
    Rule(
        "one-kl",
        lambda a: a.kl_coef != 0 and a.kl_loss_coef != 0,
        "--kl-coef {kl_coef} (in the reward) and --kl-loss-coef {kl_loss_coef} (in the loss) exclude each other: set one of them to 0",
    ),
    Rule(
        "reward-kl-needs-token-rewards",
        lambda a: _policy(a) and a.kl_coef != 0 and a.advantage_estimator in ("grpo", "gspo", "cispo"),
        "--kl-coef {kl_coef} has no effect on --advantage-estimator {advantage_estimator}, whose advantages come from group rewards "
        "alone: use --use-kl-loss --kl-loss-coef {kl_coef} instead, or an estimator of the reinforce_plus_plus family",
    ),
    Rule(
        "dual-clip-above-one",
        lambda a: a.eps_clip_c is not None and a.eps_clip_c <= 1,
        "--eps-clip-c {eps_clip_c} must be above 1: it bounds how much worse than on-policy a negative advantage may count",
    ),
    Rule(
        "reinforce-needs-whitening",
        lambda a: a.advantage_estimator.startswith("reinforce_plus_plus") and not a.normalize_advantages and _policy(a),
        "--advantage-estimator {advantage_estimator} is defined with whitened advantages: set --normalize-advantages",
    ),
    Rule(
        "policy-loss-needs-advantages",
        lambda a: _policy(a) and not a.compute_advantages_and_returns,
        "--loss-type policy_loss needs advantages: drop --disable-compute-advantages-and-returns, or set --loss-type sft_loss",
    ),
    Rule(
        "sft-without-advantages",
        lambda a: a.loss_type == "sft_loss" and a.compute_advantages_and_returns,
        "--loss-type sft_loss has no rewards: set --disable-compute-advantages-and-returns too",
    ),
    Rule(
        "custom-loss-needs-a-function",
        lambda a: a.loss_type == "custom_loss" and a.custom_loss_function_path is None,
        "--loss-type custom_loss needs --custom-loss-function-path",
    ),
    Rule(
        "one-correction",
        lambda a: a.use_rollout_logprobs and a.use_tis,
        "--use-rollout-logprobs makes the engine's log-probs the old policy, so there is nothing left for --use-tis to correct: drop one of them",
    ),
    Rule(
        "mismatch-metrics-need-a-function",
        lambda a: a.get_mismatch_metrics and a.custom_tis_function_path is None,
        "--get-mismatch-metrics runs --custom-tis-function-path: set it",
    ),
    Rule(
        "tis-interval",
        lambda a: a.tis_clip_low > a.tis_clip,
        "--tis-clip-low {tis_clip_low} is above --tis-clip {tis_clip}",
    ),
    Rule(
        "old-actor-or-rollout-logprobs",
        lambda a: a.keep_old_actor and a.use_rollout_logprobs,
        "--keep-old-actor scores old log-probs with old weights, --use-rollout-logprobs takes the engine's instead: drop one of them",
    ),
    Rule(
        "async-ppo-is-corrected",
        lambda a: (
            a.driver == "train_async.py"
            and a.advantage_estimator == "ppo"
            and not (a.use_rollout_logprobs or a.use_tis or a.keep_old_actor)
        ),
        "train_async.py trains on data of older weights: with --advantage-estimator ppo set --use-tis, --use-rollout-logprobs or --keep-old-actor",
    ),
    Rule(
        "whole-distribution",
        lambda a: _policy(a) and (a.rollout_top_p != 1 or a.rollout_top_k != -1),
        "--rollout-top-p {rollout_top_p} and --rollout-top-k {rollout_top_k} cut the distribution that is sampled from, while the "
        "trainer scores the whole one: every ratio would be off. Set them to 1 and -1 (evaluation may cut: --eval-top-p, --eval-top-k)",
    ),
    Rule(
        "training-needs-randomness",
        lambda a: _policy(a) and a.rollout_temperature == 0 and a.load_debug_rollout_data is None,
        "--rollout-temperature 0 gives every sample of a group the same tokens, so that there is nothing to learn: set it above 0 "
        "(evaluation may be greedy: --eval-temperature 0)",
    ),
    Rule(
        "one-half-precision",
        lambda a: a.bf16 and a.fp16 and "bf16" in a.given,
        "--bf16 and --fp16 exclude each other",
    ),
    Rule(
        "flash-attention-needs-a-gpu",
        lambda a: a.train_device == "cpu" and (a.attn_implementation or "").startswith("flash_attention"),
        "--attn-implementation {attn_implementation} runs on GPUs only and the trainer is on a CPU: leave it out, or set sdpa",
    ),
    Rule(
        "replicas-divide-the-ranks",
        lambda a: a.train_backend == "fsdp" and _world_size(a) % a.dp_replicate_size != 0,
        lambda a: f"--dp-replicate-size {a.dp_replicate_size} does not divide the {_world_size(a)} trainer ranks",
    ),
    Rule(
        "one-warmup",
        lambda a: a.lr_warmup_fraction is not None and a.lr_warmup_iters > 0,
        "--lr-warmup-fraction and --lr-warmup-iters say the same thing: give one of them",
    ),
    Rule(
        "floor-below-peak",
        lambda a: a.min_lr > a.lr,
        "--min-lr {min_lr} is above --lr {lr}",
    ),
    Rule(
        "wsd-needs-a-length",
        lambda a: a.lr_decay_style == "WSD" and a.lr_wsd_decay_iters is None,
        "--lr-decay-style WSD needs --lr-wsd-decay-iters, the steps of its final decay",
    ),
    Rule(
        "wandb",
        lambda a: a.use_wandb and not has_package("wandb"),
        "--use-wandb needs the package wandb: pip install 'miles[tracking]'",
    ),
    Rule(
        "tensorboard",
        lambda a: a.use_tensorboard and not has_package("tensorboard"),
        "--use-tensorboard needs the package tensorboard: pip install 'miles[tracking]'",
    ),
)
