"""All rules, in the order in which they are reported: those that end the start, and those that only warn."""

from __future__ import annotations

import logging
from collections.abc import Iterable

from miles.arguments.args import Args
from miles.arguments.parser import ArgumentsError
from miles.arguments.rules import (
    adapters,
    agents,
    architecture,
    availability,
    batch,
    data,
    distillation,
    files,
    hooks,
    megatron,
    megatron_layout,
    megatron_model,
    observing,
    running,
    sglang,
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
    *sglang.RULES,
    *training.RULES,
    *transports.RULES,
    *agents.RULES,
    *distillation.RULES,
    *adapters.RULES,
    *megatron.RULES,
    *megatron_layout.RULES,
    *observing.RULES,
    *hooks.RULES,
    *data.RULES,
    *files.RULES,
    *architecture.RULES,
    *megatron_model.RULES,
)

WARNINGS: tuple[Rule | RuleSet, ...] = (*availability.WARNINGS, *data.WARNINGS, *sglang.WARNINGS)


def check(args: Args) -> None:
    """Log what is worth a warning, and keep it on `args` for the plan.

    Raises: ArgumentsError with every broken rule.
    """
    args.set_warnings(_broken(WARNINGS, args))
    for warning in args.warnings:
        logger.warning("%s", warning)
    problems = _broken(RULES, args)
    if problems:
        raise ArgumentsError(problems)


def _broken(rules: Iterable[Rule | RuleSet], args: Args) -> list[str]:
    return list(dict.fromkeys(p for rule in rules if works(rule.system) for p in rule.problems(args)))
