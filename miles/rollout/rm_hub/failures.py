"""What can go wrong with a reward, as values that somebody must look at; none of it is a reward of 0."""

from __future__ import annotations

import math
import numbers
from typing import Any

REWARD_ERROR = "reward_error"  # the reward function raised
REWARD_TIMEOUT = "reward_timeout"  # it did not answer within --reward-timeout
REWARD_NONE = "reward_none"  # it answered None
REWARD_NAN = "reward_nan"  # NaN or infinite
REWARD_TYPE = "reward_type"  # neither a number nor a dictionary with --reward-key
REWARD_LENGTH = "reward_length"  # a list of another length than the samples
REWARD_DATA = "reward_data"  # the data row lacks what the reward needs
REWARD_CONFIG = "reward_config"  # no usable reward is named for the sample

WAYS_OUT = {
    REWARD_ERROR: "make the reward function return a number for such a sample; where it raised is in the message",
    REWARD_TIMEOUT: "raise --reward-timeout, or bound what the reward function waits for",
    REWARD_NONE: "return a number on every path of the reward function; a filter drops what shall not train",
    REWARD_NAN: "return a finite number: look for divisions and means of nothing in the reward function",
    REWARD_TYPE: "return a number, or a dictionary whose --reward-key entry is one",
    REWARD_LENGTH: "return one reward a sample, in their order",
    REWARD_DATA: "give the row what its reward compares with: --label-key and --metadata-key name the columns",
    REWARD_CONFIG: "set --rm-type, --custom-rm-path or the row's metadata['rm_type'] to a reward that exists",
}
CATEGORIES = tuple(WAYS_OUT)


class RewardFailure(Exception):
    """A sample that could not be scored.

    Attributes:
        category: one of `CATEGORIES`; metrics count failures by it.
        permanent: asking again with the same response cannot help.
    """

    def __init__(self, category: str, message: str, *, permanent: bool = False) -> None:
        super().__init__(message)
        self.category, self.message, self.permanent = category, message, permanent

    def __reduce__(self) -> Any:
        return _rebuild, (self.category, self.message, self.permanent)


def _rebuild(category: str, message: str, permanent: bool) -> RewardFailure:
    return RewardFailure(category, message, permanent=permanent)


def check_reward(args: Any, value: Any, who: str) -> float | dict[str, Any]:
    """The reward as a float, or as the dictionary that it is.

    Args:
        value: what the reward function returned: a number (Python, NumPy, or a tensor of one element), or a dictionary
            whose `--reward-key` entry is a number. With `--custom-reward-post-process-path` anything but None passes,
            since that hook turns it into numbers.
        who: names the reward and the sample in messages.
    Raises: RewardFailure with category reward_none, reward_nan or reward_type.
    """
    if value is None:
        raise RewardFailure(REWARD_NONE, f"{who} returned None")
    number = as_number(value)
    if number is not None:
        _check_finite(number, who)
        return number
    if getattr(args, "custom_reward_post_process_path", None):
        return value
    if not isinstance(value, dict):
        raise RewardFailure(REWARD_TYPE, f"{who} returned a {type(value).__name__}; a number or a dictionary is needed")
    key = getattr(args, "reward_key", None)
    if not key:
        keys = ", ".join(map(str, value)) or "nothing"
        raise RewardFailure(
            REWARD_TYPE,
            f"{who} returned a dictionary of {keys}: set --reward-key to the entry that trains",
            permanent=True,
        )
    if key not in value:
        raise RewardFailure(REWARD_TYPE, f"{who} returned no {key!r} (--reward-key), only {', '.join(map(str, value))}")
    entry = as_number(value[key])
    if entry is None:
        category = REWARD_NONE if value[key] is None else REWARD_TYPE
        raise RewardFailure(category, f"{who} returned {value[key]!r} as {key!r} (--reward-key), not a number")
    _check_finite(entry, f"{who}, entry {key!r},")
    return {**value, key: entry}


def as_number(value: Any) -> float | None:
    """The float that a bool, int, float, NumPy scalar or one-element tensor stands for; None for anything else."""
    if isinstance(value, numbers.Real):
        return float(value)
    if getattr(value, "shape", None) is not None and hasattr(value, "item"):
        size = value.numel() if hasattr(value, "numel") else getattr(value, "size", 0)
        return as_number(value.item()) if size == 1 else None
    return None


def _check_finite(number: float, who: str) -> None:
    if not math.isfinite(number):
        raise RewardFailure(REWARD_NAN, f"{who} returned {number}")
