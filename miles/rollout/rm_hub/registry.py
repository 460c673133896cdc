"""The built-in rewards: which module each one is, what it needs, and whether it exists."""

from __future__ import annotations

import difflib
import importlib.util
from dataclasses import dataclass
from typing import Any, Literal

BOXED = "boxed_"


@dataclass(frozen=True)
class RewardType:
    """A built-in reward.

    Attributes:
        module: below `miles.rollout.rm_hub`; has `score(response, label, metadata)` where `pooled`, else
            `async score(args, sample, response)`. A pooled module imports its library at its top: only workers load it,
            and loading is not on a scoring's clock.
        pooled: CPU-bound, so it runs in the scoring pool.
        uses_metadata: the row's metadata goes to the worker too.
        label: what the row's label is to it: "needed", "used" where there is one, or "ignored".
        package, install: what must be importable, and how to get it.
        entries: keys of the dictionary that it returns; empty for a plain number.
    """

    name: str
    module: str
    pooled: bool = True
    uses_metadata: bool = False
    label: Literal["needed", "used", "ignored"] = "ignored"
    package: str | None = None
    install: str | None = None
    entries: tuple[str, ...] = ()

    @property
    def path(self) -> str:
        return f"miles.rollout.rm_hub.{self.module}.score"

    def missing_package(self) -> str | None:
        """What to install, if the reward cannot run without it."""
        if self.package is None or importlib.util.find_spec(self.package) is not None:
            return None
        return f"--rm-type {self.name} needs the package {self.package}: {self.install}"


_MATH: Any = {"label": "needed", "package": "math_verify", "install": "pip install 'miles[tasks]' (or math-verify)"}

REWARD_TYPES = {
    t.name: t
    for t in (
        RewardType("math", "math_reward", **_MATH),
        RewardType("deepscaler", "deepscaler", **_MATH),
        RewardType("gemma_math", "gemma_math", **_MATH),
        RewardType("dapo", "dapo", label="needed", entries=("score", "acc", "pred")),
        RewardType("f1", "f1", label="needed"),
        RewardType("gpqa", "gpqa", label="used", uses_metadata=True),
        RewardType(
            "ifbench", "ifbench", uses_metadata=True, package="if_verifiable", install="pip install if-verifiable"
        ),
        RewardType(
            "reasoning_gym",
            "reasoning_gym_reward",
            label="used",
            uses_metadata=True,
            package="reasoning_gym",
            install="pip install 'miles[tasks]' (or reasoning-gym)",
        ),
        RewardType("remote_rm", "remote_rm", label="used", pooled=False),
        RewardType("random", "random_reward", pooled=False),
        RewardType("deterministic_random", "deterministic_random", pooled=False),
    )
}


def split_rm_type(rm_type: str) -> tuple[RewardType, bool]:
    """The reward of an `--rm-type` value, and whether `boxed_` asks to score the boxed answer only.

    Raises: ValueError that lists the types and the nearest ones.
    """
    name = rm_type.strip()
    boxed = name.startswith(BOXED)
    name = name.removeprefix(BOXED)
    if name not in REWARD_TYPES:
        near = difflib.get_close_matches(name, REWARD_TYPES, n=2)
        hint = f" (did you mean {' or '.join(near)}?)" if near else ""
        raise ValueError(
            f"unknown reward type {rm_type!r}{hint}: there are {', '.join(REWARD_TYPES)}, each also with the prefix "
            f"{BOXED}; your own function goes into --custom-rm-path"
        )
    return REWARD_TYPES[name], boxed
