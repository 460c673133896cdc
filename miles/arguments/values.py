"""Values of flags, from the command line (text) and from YAML or Python (already typed): one check for both."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from miles.arguments.flag import BadValue, Flag

_WORDS = {"true": True, "false": False, "yes": True, "no": False, "on": True, "off": False}


def coerce(flag: Flag, value: Any, source: str | None = None) -> Any:
    """`value` as the flag's type, checked against its choices and range.

    Args:
        source: how messages name the flag; its option when None (YAML passes `file: key`).
    Raises: BadValue.
    """
    where = source or flag.option
    if value is None:
        if flag.optional or flag.default is None:
            return None
        raise BadValue(f"{where} must have a value ({_expected(flag)})")
    if flag.append:
        return [list(entry) if isinstance(entry, (list, tuple)) else entry for entry in _as_list(flag, value, where)]
    if not flag.many:
        return _one(flag, value, where)
    values = [_one(flag, v, where) for v in _as_list(flag, value, where)]
    if isinstance(flag.nargs, int) and len(values) != flag.nargs:
        raise BadValue(f"{where} takes {flag.nargs} values, not {len(values)}")
    return values


def _as_list(flag: Flag, value: Any, where: str) -> list[Any]:
    if isinstance(value, (list, tuple)):
        return list(value)
    if isinstance(value, (str, int, float)):
        return [value]
    raise BadValue(f"{where} must be a list of {flag.kind.__name__}, not {value!r}")


def _one(flag: Flag, value: Any, where: str) -> Any:
    try:
        typed = _TYPED[flag.kind](value)
    except (TypeError, ValueError):
        raise BadValue(f"{where} must be {_expected(flag)}, not {value!r}") from None
    if flag.choices is not None and typed not in flag.choices:
        raise BadValue(f"{where} must be one of {', '.join(map(str, flag.choices))}, not {value!r}")
    if isinstance(typed, (int, float)) and not _in_range(flag, typed):
        raise BadValue(f"{where} must be {range_text(flag)}, not {value}")
    return typed


def _bool(value: Any) -> bool:
    if isinstance(value, str):
        if value.lower() not in _WORDS:
            raise ValueError(value)
        return _WORDS[value.lower()]
    if not isinstance(value, bool):
        raise TypeError(value)
    return value


def _int(value: Any) -> int:
    if isinstance(value, bool) or (isinstance(value, float) and not value.is_integer()):
        raise TypeError(value)
    return int(value)


def _float(value: Any) -> float:
    if isinstance(value, bool):
        raise TypeError(value)
    return float(value)


def _str(value: Any) -> str:
    if isinstance(value, (dict, list, tuple, set)):
        raise TypeError(value)
    return str(value)


def _json(value: Any) -> dict[str, Any]:
    parsed = json.loads(value) if isinstance(value, str) else value
    if not isinstance(parsed, dict):
        raise TypeError(value)
    return parsed


_TYPED = {bool: _bool, int: _int, float: _float, str: _str, dict: _json}
_WANTED = {bool: "true or false", int: "a whole number", float: "a number", str: "text", dict: "a JSON object"}


def _expected(flag: Flag) -> str:
    return _WANTED[flag.kind]


def _in_range(flag: Flag, value: float) -> bool:
    return (
        (flag.ge is None or value >= flag.ge)
        and (flag.gt is None or value > flag.gt)
        and (flag.le is None or value <= flag.le)
        and (flag.lt is None or value < flag.lt)
    )


def range_text(flag: Flag) -> str:
    """`at least 1 and at most 5`, or an empty string."""
    words = (("at least", flag.ge), ("greater than", flag.gt), ("at most", flag.le), ("less than", flag.lt))
    return " and ".join(f"{word} {bound:g}" for word, bound in words if bound is not None)


def show(value: Any) -> str:
    """A value as messages and pages print it."""
    if isinstance(value, str):
        return value
    if isinstance(value, Sequence):
        return " ".join(map(str, value)) or "(empty)"
    return str(value)
