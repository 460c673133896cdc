"""Advantages, losses, KL, and the optimizer settings that every algorithm has."""

from __future__ import annotations

from miles.arguments.flag import flag, group


@group("Algorithm and loss")
class AlgorithmArgs:
    loss_type: str = flag("policy_loss", "What is minimised.", choices=("policy_loss", "sft_loss", "custom_loss"))
    custom_loss_function_path: str | None = flag(
        None, "(args, batch, logits, sum_of_sample_mean) -> (loss, metrics).", hook="loss", owner="custom-loss"
    )
    advantage_estimator: str = flag(
        "grpo",
        "How rewards become advantages. cispo is this project's addition: grpo advantages, clipped and detached ratios.",
        choices=("grpo", "gspo", "reinforce_plus_plus", "reinforce_plus_plus_baseline", "ppo", "cispo"),
    )
    compute_advantages_and_returns: bool = flag(
        True, "Skip advantages, as supervised training does.", off="--disable-compute-advantages-and-returns"
    )
    eps_clip: float = flag(0.2, "How far the ratio may fall below 1.", ge=0, owner="policy-loss")
    eps_clip_high: float | None = flag(
        None, "How far it may rise above 1. Unset: --eps-clip.", ge=0, owner="policy-loss"
    )
    eps_clip_c: float | None = flag(
        None, "Dual clip: bound of the loss for negative advantages, above 1.", owner="policy-loss"
    )
    kl_coef: float = flag(0.0, "KL to the reference model, taken off the reward.")
    use_kl_loss: bool = flag(False, "Add KL to the reference model to the loss.")
    kl_loss_coef: float = flag(0.0, "Its weight.", owner="kl-loss")
    kl_loss_type: str = flag("k1", "Estimator of KL, in loss and reward.", choices=("k1", "k2", "k3", "low_var_kl"))
    use_unbiased_kl: bool = flag(False, "Weight the KL estimate by the importance ratio.", owner="kl-loss")
    entropy_coef: float = flag(0.0, "Weight of the entropy bonus.")
    observe_training_entropy: bool = flag(False, "Report entropy of the training pass though its weight is 0.")
    use_rollout_entropy: bool = flag(False, "Report entropy of the scoring pass.")
    gamma: float = flag(1.0, "Discount of later rewards (reinforce_plus_plus, ppo).", ge=0, le=1, owner="discounted")
    lambd: float = flag(1.0, "Lambda of generalised advantage estimation.", ge=0, le=1, owner="critic")
    normalize_advantages: bool = flag(False, "Whiten advantages over the whole batch.")
    grpo_std_normalization: bool = flag(
        True, "Do not divide group-centred rewards by the group's deviation.", off="--disable-grpo-std-normalization"
    )
    rewards_normalization: bool = flag(
        True, "Use rewards as they are, without centring groups.", off="--disable-rewards-normalization"
    )
    calculate_per_token_loss: bool = flag(False, "Weigh every token alike, instead of every trajectory.")
    custom_pg_loss_reducer_function_path: str | None = flag(
        None,
        "(total_lengths, response_lengths, loss_masks, calculate_per_token_loss) -> reducer of the policy loss.",
        hook="loss_reducer",
        owner="policy-loss",
    )
    ref_update_interval: int | None = flag(
        None, "Copy the policy into the reference model after this many rollouts.", ge=1, owner="reference"
    )
    reset_optimizer_states: bool = flag(False, "Start every rollout with fresh optimizer moments.")
    use_opsm: bool = flag(
        False, "Mask sequences with negative advantage that moved too far off policy.", owner="policy-loss"
    )
    opsm_delta: float = flag(1e-4, "How far: mean log-ratio of a sequence.", owner="opsm")
    seed: int = flag(1234, "Seed of the trainer.", ge=0)


@group("PPO critic", system="critic", owner="critic")
class CriticArgs:
    critic_num_nodes: int | None = flag(None, "Nodes of the critic; the trainer's.", ge=1)
    critic_num_gpus_per_node: int | None = flag(None, "GPUs of the critic on each node; the trainer's.", ge=1)
    critic_load: str | None = flag(
        None,
        "The critic's checkpoints. Unset: --load with _critic added; --load itself where that is a Hugging Face directory.",
        metavar="DIR",
    )
    critic_save: str | None = flag(None, "Unset: --save with _critic added.", metavar="DIR")
    critic_lr: float | None = flag(None, "Unset: --lr.", gt=0)
    critic_lr_warmup_iters: int = flag(0, "Steps over which the critic's learning rate rises.", ge=0)
    num_critic_only_steps: int = flag(0, "First rollouts that train the critic alone.", ge=0)
    value_clip: float = flag(0.2, "How far a value may move in one step.", ge=0)
