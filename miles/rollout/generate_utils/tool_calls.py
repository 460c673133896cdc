"""Tool calls in a model's text. What cannot be executed is kept as a call with an error: the model is told, nobody crashes."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class ToolCall:
    """A call as the model wrote it. With `error` set it must not be executed; the error is the tool's answer."""

    name: str
    arguments: dict[str, Any]
    error: str | None = None


def _call_from(value: Any, arguments_keys: tuple[str, ...] = ("arguments", "parameters")) -> ToolCall:
    """A call from parsed JSON; anything but an object with a name and object arguments is an error to tell."""
    if not isinstance(value, dict):
        return ToolCall("", {}, f"a tool call must be a JSON object, not {json.dumps(value)[:80]}")
    name = value.get("name")
    if not isinstance(name, str) or not name:
        return ToolCall("", {}, "a tool call needs a name")
    arguments: Any = next((value[key] for key in arguments_keys if key in value), {})
    if isinstance(arguments, str):  # some models write the arguments as JSON text
        try:
            arguments = json.loads(arguments)
        except json.JSONDecodeError as error:
            return ToolCall(name, {}, f"the arguments are not JSON: {error.msg}")
    if not isinstance(arguments, dict):
        return ToolCall(name, {}, f"the arguments must be a JSON object, not {json.dumps(arguments)[:80]}")
    return ToolCall(name, arguments)


def _call_from_text(text: str) -> ToolCall:
    try:
        return _call_from(json.loads(text))
    except json.JSONDecodeError as error:
        return ToolCall("", {}, f"the tool call is not JSON: {error.msg}: {text.strip()[:80]}")


_HERMES = re.compile(r"<tool_call>(.*?)(?:</tool_call>|$)", re.DOTALL)


def parse_hermes(text: str) -> list[ToolCall]:
    """`<tool_call>{"name": ..., "arguments": {...}}</tool_call>`, any number of them; an unclosed last one counts."""
    return [_call_from_text(body) for body in _HERMES.findall(_after_reasoning(text))]


def parse_mistral(text: str) -> list[ToolCall]:
    """`[TOOL_CALLS][{"name": ..., "arguments": {...}}, ...]`."""
    _, marker, body = text.partition("[TOOL_CALLS]")
    if not marker:
        return []
    try:
        calls, _ = json.JSONDecoder().raw_decode(body.strip())
    except json.JSONDecodeError as error:
        return [ToolCall("", {}, f"the tool calls are not JSON: {error.msg}: {body.strip()[:80]}")]
    return [_call_from(call) for call in (calls if isinstance(calls, list) else [calls])]


def parse_llama3(text: str) -> list[ToolCall]:
    """A whole answer that is one JSON object `{"name": ..., "parameters": {...}}`, `<|python_tag|>` before it or not."""
    tagged = "<|python_tag|>" in text
    body = re.sub(r"<\|(python_tag|eot_id|eom_id)\|>", "", text).strip()
    if not tagged and not (body.startswith("{") and '"name"' in body):
        return []
    return [_call_from_text(body)]


def _after_reasoning(text: str) -> str:
    """Calls inside the reasoning are thoughts, not calls."""
    return text.rpartition("</think>")[2]


PARSERS: dict[str, Callable[[str], list[ToolCall]]] = {
    "hermes": parse_hermes,
    "qwen25": parse_hermes,
    "qwen": parse_hermes,
    "mistral": parse_mistral,
    "llama3": parse_llama3,
}


def tool_call_parser(name: str) -> Callable[[str], list[ToolCall]]:
    """The parser of `--generate-tool-call-parser`. Raises: ValueError that lists the known ones."""
    if name not in PARSERS:
        raise ValueError(f"--generate-tool-call-parser {name}: use one of {', '.join(sorted(PARSERS))}")
    return PARSERS[name]
