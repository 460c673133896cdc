"""Flags that user functions bring along: an `add_arguments(parser)` attribute on a rollout or generate function."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from miles.arguments.parser import ArgumentsError, FlagParser
from miles.utils.imports import ImportPathError, load_function

logger = logging.getLogger(__name__)
_CARRIERS = ("--rollout-function-path", "--custom-generate-function-path", "--eval-function-path")


def add_function_flags(parser: FlagParser, argv: Sequence[str]) -> list[str]:
    """Let the functions named on the command line register their flags. Returns problems.

    A path that cannot be imported is left to the rule that checks hooks.
    """
    problems = []
    for path in _paths(argv):
        try:
            function = load_function(path)
        except ImportPathError:
            continue
        register = getattr(function, "add_arguments", None)
        if not callable(register):
            continue
        try:
            register(parser)
        except ArgumentsError as error:
            problems += error.problems
        except Exception as error:
            problems.append(f"{path}.add_arguments failed: {type(error).__name__}: {error}")
    for option in parser.reused:
        logger.info("%s is a flag already; the function that declares it again reads the same value", option)
    return problems


def _paths(argv: Sequence[str]) -> list[str]:
    found = []
    for i, word in enumerate(argv):
        name, equals, value = word.partition("=")
        if name in _CARRIERS:
            if equals:
                found.append(value)
            elif i + 1 < len(argv):
                found.append(argv[i + 1])
    return list(dict.fromkeys(found))
