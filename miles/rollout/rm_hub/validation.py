"""Rewards that cannot work, found before anything starts."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from miles.rollout.rm_hub.registry import split_rm_type
from miles.utils.imports import ImportPathError, check_accepts, load_function

_LISTED = 5


class RewardConfigError(ValueError):
    """Reward settings that cannot work; the message has every problem."""


def validate_reward_config(args: Any) -> None:
    """Raises: RewardConfigError with everything that `reward_problems` finds."""
    problems = reward_problems(args)
    if problems:
        raise RewardConfigError("\n".join(problems))


def reward_problems(args: Any) -> list[str]:
    """What is wrong with the run's reward flags: one line a problem, with what to set; empty if nothing is."""
    problems = []
    path = getattr(args, "custom_rm_path", None)
    if path:
        try:
            check_accepts(path, load_function(path), positional=2)
        except ImportPathError as error:
            problems.append(f"--custom-rm-path: {error}")
    rm_type = getattr(args, "rm_type", None)
    if rm_type and not path:
        problems += _type_problems(args, rm_type, "--rm-type")
    return problems


def _type_problems(args: Any, rm_type: str, where: str) -> list[str]:
    try:
        reward, _ = split_rm_type(str(rm_type))
    except ValueError as error:
        return [f"{where}: {error}"]
    problems = []
    missing = reward.missing_package()
    if missing:
        problems.append(missing if where == "--rm-type" else f"{where}: {missing}")
    if reward.name == "remote_rm" and not getattr(args, "rm_url", None):
        problems.append(f"{where} remote_rm needs --rm-url, the reward server's address")
    takes_dict = getattr(args, "reward_key", None) or getattr(args, "custom_reward_post_process_path", None)
    if reward.entries and not takes_dict:
        problems.append(
            f"{where} {reward.name} gives a dictionary ({', '.join(reward.entries)}): set --reward-key "
            f"{reward.entries[0]}, the entry that trains"
        )
    return problems


def row_problems(args: Any, rows: Iterable[tuple[str, dict[str, Any] | None]]) -> list[str]:
    """What is wrong with the rewards that data rows name themselves, or need and do not name.

    Args:
        rows: (where, metadata) of every row, `where` as messages say it (`train.jsonl row 7`).
    """
    if getattr(args, "custom_rm_path", None):
        return []
    places: dict[str, list[str]] = {}
    for where, metadata in rows:
        name = (metadata or {}).get("rm_type") or getattr(args, "rm_type", None) or ""
        places.setdefault(str(name), []).append(where)
    problems = []
    for name, of_name in places.items():
        more = f" and {len(of_name) - _LISTED} more" if len(of_name) > _LISTED else ""
        shown = ", ".join(of_name[:_LISTED]) + more
        if not name:
            problems.append(f"{shown}: no reward; set --rm-type, --custom-rm-path, or metadata['rm_type'] in the row")
        else:
            problems += _type_problems(args, name, f"{shown}: metadata['rm_type']")
    return problems
