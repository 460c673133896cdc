"""Rewards: which function, and how it is run."""

from __future__ import annotations

from miles.arguments.flag import flag, group


@group("Reward")
class RewardArgs:
    rm_type: str | None = flag(
        None,
        "Built-in reward (math, dapo, deepscaler, f1, gpqa, ifbench, remote_rm, ...); boxed_ scores only the boxed answer.",
    )
    rm_url: str | None = flag(None, "Address of the remote reward server.", metavar="URL")
    custom_rm_path: str | None = flag(
        None,
        "Your reward: async (args, sample) -> float or dict; with --group-rm (args, samples) -> list.",
        hook="reward",
    )
    reward_key: str | None = flag(None, "Entry of a reward dict that is the training reward.")
    eval_reward_key: str | None = flag(None, "The same for evaluation. Unset: --reward-key.")
    group_rm: bool = flag(False, "Score all samples of a group in one call.")
    reward_timeout: float = flag(
        30.0, "Seconds that one reward may take; then the sample failed, it is not worth 0.", gt=0
    )
    reward_num_workers: int = flag(1, "Processes that run CPU-bound built-in rewards.", ge=1)
    custom_reward_post_process_path: str | None = flag(
        None, "Replaces group normalisation: (args, samples) -> (raw_rewards, rewards).", hook="reward_post_process"
    )
    custom_convert_samples_to_train_data_path: str | None = flag(
        None, "Replaces the conversion of samples to training columns: (args, samples) -> dict.", hook="convert_samples"
    )
