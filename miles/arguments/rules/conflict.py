"""Rules of one shape: a feature and the flags that it does not go together with, listed in one message."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from miles.arguments.args import Args
from miles.arguments.rules.rule import Rule

Condition = Callable[[Args], Any]


@dataclass(frozen=True)
class Clash:
    """`flag`: how the other side is spelled; `given`: whether it is asked for."""

    flag: str
    given: Condition


def excludes(name: str, feature: str, on: Condition, *clashes: Clash) -> Rule:
    """A rule that is broken when the feature is on together with any of `clashes`; names those that are."""

    def found(args: Args) -> list[str]:
        return [clash.flag for clash in clashes if clash.given(args)] if on(args) else []

    return Rule(
        name, found, lambda args: f"{feature} does not go together with {', '.join(found(args))}: drop one of them"
    )


def requires(name: str, feature: str, on: Condition, *needs: Clash) -> Rule:
    """A rule that is broken when the feature is on and something that it needs is not; names what lacks."""

    def lacking(args: Args) -> list[str]:
        return [need.flag for need in needs if not need.given(args)] if on(args) else []

    return Rule(name, lacking, lambda args: f"{feature} needs {', '.join(lacking(args))}")
