"""All rules, in the order in which they are reported."""

from __future__ import annotations

import logging

from miles.arguments.args import Args
from miles.arguments.parser import ArgumentsError
from miles.arguments.rules import (
    adapters,
    agents,
    architecture,
    availability,
    batch,
    distillation,
    files,
    hooks,
    megatron,
    observing,
    running,
    training,
    transports,
)
from miles.arguments.rules.rule import Rule, RuleSet
from miles.arguments.systems import works

logger = logging.getLogger(__name__)

RULES: tuple[Rule | RuleSet, ...] = (
    *availability.RULES,
    *batch.RULES,
    *running.RULES,
    *training.RULES,
    *transports.RULES,
    *agents.RULES,
    *distillation.RULES,
    *adapters.RULES,
    *megatron.RULES,
    *observing.RULES,
    *hooks.RULES,
    *files.RULES,
    *architecture.RULES,
)


def check(args: Args) -> None:
    """Raises: ArgumentsError with every broken rule."""
    for warning in availability.idle_warnings(args):
        logger.warning("%s", warning)
    problems = [problem for rule in RULES if works(rule.system) for problem in rule.problems(args)]
    if problems:
        raise ArgumentsError(dict.fromkeys(problems))
