"""Rewards that cannot work, found before anything starts."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from miles.rollout.dataset import DatasetKeys, PromptRow
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


def prompt_row_problems(args: Any, rows: Iterable[PromptRow], overrides: dict[str, Any] | None = None) -> list[str]:
    """`row_problems` of prompts, with `overrides` on top of each one's metadata."""
    named = [(row.where, {**row.metadata, **(overrides or {})}) for row in rows]
    if getattr(args, "custom_generate_function_path", None) and not getattr(args, "rm_type", None):
        named = [(where, metadata) for where, metadata in named if metadata.get("rm_type")]  # it may score by itself
    return row_problems(args, named)


def label_problems(
    args: Any, rows: Sequence[PromptRow], keys: DatasetKeys, overrides: dict[str, Any] | None = None
) -> list[str]:
    """Rewards of a data set that compare with a label which its rows do not have.

    Args:
        rows: what is known of the data set; where that is nothing, `--rm-type` alone is looked at.
    """
    default, own = getattr(args, "rm_type", None), (overrides or {}).get("rm_type")
    named = [(row, own or row.metadata.get("rm_type") or default) for row in rows]
    if keys.label is None:
        needing = {
            name for name in [*(name for _, name in named), *([] if rows else [own or default])] if _needs_label(name)
        }
        return [
            f"reward {name} compares responses with a label, and none is read from {keys.option}: set {keys.set_label} "
            "to the column that has it"
            for name in sorted(map(str, needing))
        ]
    blank = [row.where for row, name in named if _needs_label(name) and not (row.label or "").strip()]
    return [f"{_listed(blank)}: {keys.label!r} is empty, and the reward compares with it"] if blank else []


def _needs_label(name: Any) -> bool:
    try:
        return bool(name) and split_rm_type(str(name))[0].label == "needed"
    except ValueError:
        return False  # an unknown type is reported as such


def _listed(places: list[str]) -> str:
    more = f" and {len(places) - _LISTED} more" if len(places) > _LISTED else ""
    return ", ".join(places[:_LISTED]) + more


def row_problems(args: Any, rows: Iterable[tuple[str, dict[str, Any] | None]]) -> list[str]:
    """What is wrong with the rewards that data rows name themselves, or need and do not name.

    Args:
        rows: (where, metadata) of every row, `where` as messages say it (`train.jsonl row 7`).
    """
    if getattr(args, "custom_rm_path", None):
        return []
    places: dict[str, list[str]] = {}
    default = getattr(args, "rm_type", None)
    for where, metadata in rows:
        name = (metadata or {}).get("rm_type") or default or ""
        if not name or name != default:  # the run's own is looked at once, by `reward_problems`
            places.setdefault(str(name), []).append(where)
    problems = []
    for name, of_name in places.items():
        shown = _listed(of_name)
        if not name:
            problems.append(f"{shown}: no reward; set --rm-type, --custom-rm-path, or metadata['rm_type'] in the row")
        else:
            problems += _type_problems(args, name, f"{shown}: metadata['rm_type']")
    return problems
