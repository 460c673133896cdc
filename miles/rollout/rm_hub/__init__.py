"""Rewards: `await async_rm(args, sample)` scores a sample by whatever the run or the sample says.

Which function scores, first match wins: the sample's `reward_spec.custom_rm_path`, `--custom-rm-path`, the sample's
`reward_spec.rm_type`, the row's `metadata["rm_type"]`, `--rm-type`. One file a built-in reward; `registry.py` lists them.
"""

from miles.rollout.rm_hub.failures import RewardFailure
from miles.rollout.rm_hub.scoring import (
    async_rm,
    batched_async_rm,
    batched_outcomes,
    close_rewards,
    score_group,
    score_sample,
)
from miles.rollout.rm_hub.scoring_pool import ScoringPool
from miles.rollout.rm_hub.validation import (
    RewardConfigError,
    label_problems,
    prompt_row_problems,
    reward_problems,
    row_problems,
    validate_reward_config,
)

__all__ = [
    "RewardConfigError",
    "RewardFailure",
    "ScoringPool",
    "async_rm",
    "batched_async_rm",
    "batched_outcomes",
    "close_rewards",
    "label_problems",
    "prompt_row_problems",
    "reward_problems",
    "row_problems",
    "score_group",
    "score_sample",
    "validate_reward_config",
]
