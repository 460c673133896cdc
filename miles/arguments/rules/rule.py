"""What a rule is."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

from miles.arguments.args import Args


@dataclass(frozen=True)
class Rule:
    """One thing that must not be, and what to say about it.

    Attributes:
        name: stable, for tests and for reports.
        broken: true when the arguments break the rule.
        system: the system of `systems.py` that the rule is about; until that works, its flags are refused as a whole.
        say: names the flags and what to set. A text, formatted with the flags as `{name}`, or a function of the arguments.
    """

    name: str
    broken: Callable[[Args], Any]
    say: str | Callable[[Args], str]
    system: str | None = None

    def problems(self, args: Args) -> list[str]:
        if not self.broken(args):
            return []
        if callable(self.say):
            return [self.say(args)]
        return [self.say.format_map(_Values(args))]


def about(system: str, *rules: Rule) -> tuple[Rule, ...]:
    """The same rules, kept back until `system` works."""
    return tuple(replace(rule, system=system) for rule in rules)


@dataclass(frozen=True)
class RuleSet:
    """A rule that finds any number of problems of one kind: missing files, wrong hooks, flags without effect."""

    name: str
    find: Callable[[Args], Iterable[str]]
    system: str | None = None

    def problems(self, args: Args) -> list[str]:
        return list(self.find(args))


class _Values(dict):
    def __init__(self, args: Args) -> None:
        super().__init__()
        self._args = args

    def __missing__(self, name: str) -> Any:
        return getattr(self._args, name)
