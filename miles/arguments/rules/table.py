"""All rules, in the order in which they are reported."""

from __future__ import annotations

import logging

from miles.arguments.args import Args
from miles.arguments.parser import ArgumentsError
from miles.arguments.rules import architecture, availability, batch, files, hooks, running, training
from miles.arguments.rules.rule import Rule, RuleSet

logger = logging.getLogger(__name__)

RULES: tuple[Rule | RuleSet, ...] = (
    *availability.RULES,
    *batch.RULES,
    *running.RULES,
    *training.RULES,
    *hooks.RULES,
    *files.RULES,
    *architecture.RULES,
)


def check(args: Args) -> None:
    """Raises: ArgumentsError with every broken rule."""
    for warning in availability.idle_warnings(args):
        logger.warning("%s", warning)
    problems = [problem for rule in RULES for problem in rule.problems(args)]
    if problems:
        raise ArgumentsError(dict.fromkeys(problems))
