"""All rules, in the order in which they are reported."""

from __future__ import annotations

from miles.arguments.args import Args
from miles.arguments.parser import ArgumentsError
from miles.arguments.rules.rule import Rule, RuleSet

RULES: tuple[Rule | RuleSet, ...] = ()


def check(args: Args) -> None:
    """Raises: ArgumentsError with every broken rule."""
    problems = [problem for rule in RULES for problem in rule.problems(args)]
    if problems:
        raise ArgumentsError(dict.fromkeys(problems))
