"""The startup rules: `check(args)` raises one ArgumentsError with everything that is wrong."""

from __future__ import annotations

from miles.arguments.rules.rule import Rule
from miles.arguments.rules.table import RULES, WARNINGS, check

__all__ = ["RULES", "WARNINGS", "Rule", "check"]
