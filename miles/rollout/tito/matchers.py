"""Is a replayed message the stored one? The three built-in answers, and user functions by import path.

A matcher is `(stored, replayed) -> bool`. On a match the stored message and its tokens stay authoritative, so a loose matcher
never rewrites history; it only finds it. None, "" and [] are the same everywhere; other blanks are not.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable
from decimal import Decimal
from typing import Any

Message = dict[str, Any]
Matcher = Callable[[Message, Message], bool]

# Templates of some families render the two last ones.
_FIELDS = ("role", "content", "reasoning_content", "name", "tool_call_id")
_MISSING = object()


class MatcherError(RuntimeError):
    """A matcher raised, or answered with something else than True or False."""


def strict(stored: Message, replayed: Message) -> bool:
    """Role, content, reasoning, tool calls, `name` and `tool_call_id` are the same, types included."""
    return _same_fields(stored, replayed, _FIELDS) and same(_calls(stored), _calls(replayed))


def loose_tool_call(stored: Message, replayed: Message) -> bool:
    """As strict, but arguments of tool calls are compared as the JSON objects that they spell."""
    if not _same_fields(stored, replayed, _FIELDS):
        return False
    left, right = _calls(stored), _calls(replayed)
    if not isinstance(left, list) or not isinstance(right, list) or len(left) != len(right):
        return same(left, right)
    return all(map(_same_call, left, right))


def role_content_only(stored: Message, replayed: Message) -> bool:
    """Role and content. Turns that only call tools have no content, so different calls look the same: a last resort."""
    return _same_fields(stored, replayed, ("role", "content"))


MATCHERS: dict[str, Matcher] = {
    "strict": strict,
    "loose_tool_call": loose_tool_call,
    "role_content_only": role_content_only,
}


def resolve_matcher(name: str) -> Matcher:
    """The matcher of `--session-message-matcher`: a name of `MATCHERS` or an import path.

    The result raises MatcherError where a user's function raises or gives no bool.
    Raises: ValueError for what is neither, and for async functions.
    """
    if name in MATCHERS:
        return MATCHERS[name]
    if "." not in name:
        raise ValueError(f"--session-message-matcher {name}: use one of {', '.join(MATCHERS)}, or an import path")
    from miles.utils.imports import load_function

    function = load_function(name)
    if not callable(function):
        raise ValueError(f"--session-message-matcher {name} is a {type(function).__name__}, not a function")
    if inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(getattr(function, "__call__", None)):  # noqa: B004
        raise ValueError(f"--session-message-matcher {name} is async: matchers are called without awaiting")

    def checked(stored: Message, replayed: Message) -> bool:
        try:
            answer = function(stored, replayed)
        except Exception as error:
            raise MatcherError(f"the message matcher {name} raised {type(error).__name__}: {error}") from error
        if not isinstance(answer, bool):
            raise MatcherError(f"the message matcher {name} answered {answer!r}, which is neither True nor False")
        return answer

    return checked


def text_of(content: Any) -> Any:
    """Content with text parts joined; None for empty content; anything else as it is."""
    if isinstance(content, list) and content and all(_is_text_part(part) for part in content):
        content = "".join(part["text"] for part in content)
    return None if content is None or content == "" or content == [] else content


def same(a: Any, b: Any) -> bool:
    """Equality that tells True from 1 and 1 from 1.0, at any depth of nesting."""
    stack = [(a, b)]
    while stack:
        a, b = stack.pop()
        if a is b:
            continue
        if type(a) is not type(b):
            return False
        if isinstance(a, dict):
            if a.keys() != b.keys():
                return False
            stack.extend((a[key], b[key]) for key in a)
        elif isinstance(a, list):
            if len(a) != len(b):
                return False
            stack.extend(zip(a, b, strict=True))
        elif a != b:
            return False
    return True


def _is_text_part(part: Any) -> bool:
    return isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str)


def _same_fields(stored: Message, replayed: Message, names: tuple[str, ...]) -> bool:
    return all(same(text_of(stored.get(name)), text_of(replayed.get(name))) for name in names)


def _calls(message: Message) -> Any:
    """Tool calls without what clients add to them; None for none."""
    calls = message.get("tool_calls")
    if not calls:
        return None
    return [_bare(call) for call in calls] if isinstance(calls, list) else calls


def _bare(call: Any) -> Any:
    """A call without `index`, which only streams have, and `parsed_arguments`, which OpenAI's client keeps its own reading in."""
    if not isinstance(call, dict):
        return call
    call = {k: v for k, v in call.items() if k != "index"}
    function = call.get("function")
    if isinstance(function, dict) and "parsed_arguments" in function:
        call["function"] = {k: v for k, v in function.items() if k != "parsed_arguments"}
    return call


def _same_call(left: Any, right: Any) -> bool:
    asked, replayed = (one.get("function") if isinstance(one, dict) else None for one in (left, right))
    if not isinstance(asked, dict) or not isinstance(replayed, dict):
        return same(left, right)
    rest = [{k: v for k, v in one.items() if k != "function"} for one in (left, right)]
    rest += [{k: v for k, v in function.items() if k != "arguments"} for function in (asked, replayed)]
    if not same(rest[0], rest[1]) or not same(rest[2], rest[3]):
        return False
    return _same_arguments(asked.get("arguments", _MISSING), replayed.get("arguments", _MISSING))


def _same_arguments(a: Any, b: Any) -> bool:
    if a is _MISSING or b is _MISSING:
        return a is b
    left, right = _as_object(a), _as_object(b)
    return same(a, b) if left is None or right is None else same(left, right)


def _as_object(arguments: Any) -> dict | None:
    """The JSON object, numbers as exact decimals; None where `arguments` spells none."""
    if arguments is None or arguments == "":
        return {}
    try:
        if isinstance(arguments, dict):
            arguments = json.dumps(arguments, allow_nan=False)
        if not isinstance(arguments, str):
            return None
        value = json.loads(
            arguments, parse_int=Decimal, parse_float=Decimal, parse_constant=_refuse, object_pairs_hook=_unique
        )
    except (ValueError, TypeError, ArithmeticError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def _refuse(constant: str) -> Any:
    raise ValueError(f"{constant} is no JSON")


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    out = dict(pairs)
    if len(out) != len(pairs):
        raise ValueError("duplicate keys")
    return out
