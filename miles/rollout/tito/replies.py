"""What a model wrote, as an assistant message: reasoning, content and tool calls, of a finished text or of one that grows.

The text goes one way only: the message is what the agent sees, the sampled ids are what is stored. A call that cannot be read
whole is handed on with its arguments as they were written, so that the agent can tell the model what is wrong.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Call:
    """A tool call: `arguments` is JSON text, or whatever the model wrote in its place."""

    name: str
    arguments: str
    id: str | None = None


@dataclass(frozen=True)
class Reply:
    content: str = ""
    reasoning: str | None = None
    calls: list[Call] = field(default_factory=list)


@dataclass(frozen=True)
class ReplyParser:
    """Reads replies of one family.

    Args:
        reasoning: `think`, `harmony` or None. tools: a name of `TOOL_FORMATS`, `harmony` or None.
        opened: the prompt ended inside of the reasoning.
        specs: the request's tools; without them nothing is a call.
        stops: texts that would end the reply and are no part of it.
    """

    reasoning: str | None
    tools: str | None
    opened: bool = False
    specs: Sequence[Mapping[str, Any]] | None = None
    stops: tuple[str, ...] = ()

    def parse(self, text: str, *, final: bool = True) -> Reply:
        """The reply so far. With `final=False` it holds only what later text cannot change: a prefix of every later one."""
        if self.reasoning == "harmony":
            return _harmony(text, bool(self.specs), final)
        reasoning, content, closed = self._split_reasoning(text, final)
        if not closed:
            return Reply("", reasoning)
        if not self.specs or self.tools is None:
            return Reply(content if final else _held_back(content, self.stops), reasoning)
        before, calls = _split_calls(content, TOOL_FORMATS[self.tools], self.specs, final, self.stops)
        return Reply(before, reasoning, calls)

    def _split_reasoning(self, text: str, final: bool) -> tuple[str | None, str, bool]:
        """Reasoning, the rest, and whether the reasoning is over (or there is none)."""
        if self.reasoning is None:
            return None, text, True
        opened, inside = self.opened, text
        stripped = text.lstrip()
        if stripped.startswith("<think>"):
            opened, inside = True, stripped.removeprefix("<think>")
        elif not final and not opened and "<think>".startswith(stripped):
            return None, "", False
        if not opened:
            return None, text, True
        thought, marker, rest = inside.partition("</think>")
        if not marker:
            return (thought if final else _held_back(thought, ("</think>",))).strip("\n") or None, "", False
        return thought.strip("\n") or None, rest.lstrip("\n"), True


def _held_back(text: str, markers: Sequence[str]) -> str:
    """Text without an end that may still become a marker, half a character, or blanks that may be cut."""
    text = text.rstrip("\ufffd")
    for marker in markers:
        for n in range(min(len(marker), len(text)), 0, -1):
            if text.endswith(marker[:n]):
                text = text[:-n]
                break
    return text.rstrip()


# ---- formats of tool calls -------------------------------------------------------------------------------------------

Specs = Sequence[Mapping[str, Any]]


@dataclass(frozen=True)
class ToolFormat:
    """`starts` begin the part with calls; `block` finds one call in it; `read` makes a call of a match, None if it cannot.

    `close` ends a block that may also be cut short by the end of the text; while the text grows it is no call yet.
    """

    starts: tuple[str, ...]
    block: re.Pattern[str]
    read: Callable[[re.Match[str], Specs], Call | None]
    close: str = ""


def _split_calls(
    text: str, form: ToolFormat, specs: Specs, final: bool, stops: tuple[str, ...]
) -> tuple[str, list[Call]]:
    at = min((i for start in form.starts if (i := text.find(start)) >= 0), default=-1)
    if at < 0:
        return (text if final else _held_back(text, (*form.starts, *stops))), []
    blocks = [match for match in form.block.finditer(text, at) if final or match[0].endswith(form.close)]
    calls = [form.read(match, specs) for match in blocks]
    known = [call for call in calls if call is not None]
    if final and not known:
        return text, []  # nothing in it names a tool: these are words
    return text[:at].rstrip(), known


def _hermes(match: re.Match[str], specs: Specs) -> Call | None:
    body = match[1].strip()
    try:
        value = json.loads(body)
    except (ValueError, RecursionError):
        name = re.search(r'"name"\s*:\s*"([^"]+)"', body)
        if name is None:
            return None
        given = re.search(r'"(?:arguments|parameters)"\s*:\s*(.*)', body, re.DOTALL)
        return Call(name[1], given[1] if given else body)
    if not isinstance(value, dict) or not isinstance(value.get("name"), str) or not value["name"]:
        return None
    given_arguments: Any = next((value[key] for key in ("arguments", "parameters") if key in value), {})
    return Call(value["name"], given_arguments if isinstance(given_arguments, str) else _dumps(given_arguments))


def _tagged(
    pair: re.Pattern[str], strip: Callable[[str], str] = str.strip
) -> Callable[[re.Match[str], Specs], Call | None]:
    """Calls whose arguments are name and value in tags: values of string parameters as they are, others as JSON."""

    def read(match: re.Match[str], specs: Specs) -> Call | None:
        name = match["name"].strip()
        if not name:
            return None
        types = _types(name, specs)
        arguments: dict[str, Any] = {}
        for one in pair.finditer(match["body"]):
            key, value = one["key"].strip(), strip(one["value"])
            as_text = one.groupdict().get("string")
            is_text = types.get(key) == "string" if as_text is None else as_text == "true"
            arguments[key] = value if is_text else _value(value)
        return Call(name, _dumps(arguments))

    return read


def _types(name: str, specs: Specs) -> dict[str, Any]:
    for spec in specs:
        function = spec.get("function") or {}
        if function.get("name") == name:
            properties = (function.get("parameters") or {}).get("properties") or {}
            return {key: value.get("type") for key, value in properties.items() if isinstance(value, dict)}
    return {}


def _value(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text


def _dumps(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def _kimi(match: re.Match[str], specs: Specs) -> Call | None:
    name = match[1].strip().removeprefix("functions.").rpartition(":")[0] or match[1].strip()
    return Call(name, match[2].strip() or "{}", match[1].strip())


def _newlines(text: str) -> str:
    return text.removeprefix("\n").removesuffix("\n")


_DSML = "｜DSML｜"
TOOL_FORMATS: dict[str, ToolFormat] = {
    # <tool_call>{"name": ..., "arguments": {...}}</tool_call>
    "hermes": ToolFormat(
        ("<tool_call>",), re.compile(r"<tool_call>(.*?)(?:</tool_call>|\Z)", re.DOTALL), _hermes, "</tool_call>"
    ),
    # <tool_call><function=NAME><parameter=KEY>VALUE</parameter></function></tool_call>
    "qwen3_coder": ToolFormat(
        ("<tool_call>", "<function="),
        re.compile(r"<function=(?P<name>[^>]*)>(?P<body>.*?)</function>", re.DOTALL),
        _tagged(re.compile(r"<parameter=(?P<key>[^>]*)>(?P<value>.*?)</parameter>", re.DOTALL), _newlines),
    ),
    # <tool_call>NAME<arg_key>KEY</arg_key><arg_value>VALUE</arg_value></tool_call>
    "glm47": ToolFormat(
        ("<tool_call>",),
        re.compile(r"<tool_call>(?P<name>[^<]*)(?P<body>.*?)</tool_call>", re.DOTALL),
        _tagged(
            re.compile(r"<arg_key>(?P<key>.*?)</arg_key>\s*<arg_value>(?P<value>.*?)</arg_value>", re.DOTALL), _newlines
        ),
    ),
    # <minimax:tool_call><invoke name="NAME"><parameter name="KEY">VALUE</parameter></invoke></minimax:tool_call>
    "minimax_m2": ToolFormat(
        ("<minimax:tool_call>",),
        re.compile(r'<invoke name="(?P<name>[^"]*)">(?P<body>.*?)</invoke>', re.DOTALL),
        _tagged(re.compile(r'<parameter name="(?P<key>[^"]*)">(?P<value>.*?)</parameter>', re.DOTALL), _newlines),
    ),
    # the same with DSML in front of each tag, and with what is a string said so
    "dsml": ToolFormat(
        (f"<{_DSML}function_calls>", f"<{_DSML}tool_calls>"),
        re.compile(rf'<{_DSML}invoke name="(?P<name>[^"]*)">(?P<body>.*?)</{_DSML}invoke>', re.DOTALL),
        _tagged(
            re.compile(
                rf'<{_DSML}parameter name="(?P<key>[^"]*)" string="(?P<string>true|false)">(?P<value>.*?)</{_DSML}parameter>',
                re.DOTALL,
            ),
            str,
        ),
    ),
    # <|tool_call_begin|>functions.NAME:INDEX<|tool_call_argument_begin|>{...}<|tool_call_end|>
    "kimi_k2": ToolFormat(
        ("<|tool_calls_section_begin|>", "<|tool_call_begin|>"),
        re.compile(r"<\|tool_call_begin\|>(.*?)<\|tool_call_argument_begin\|>(.*?)<\|tool_call_end\|>", re.DOTALL),
        _kimi,
    ),
}


# ---- harmony ---------------------------------------------------------------------------------------------------------

_SEGMENT = re.compile(
    r"(?:<\|start\|>assistant)?(?P<head>[^<]*(?:<\|(?:channel|constrain)\|>[^<]*)*)<\|message\|>(?P<body>.*?)"
    r"(?P<end><\|end\|>|<\|call\|>|<\|return\|>|\Z)",
    re.DOTALL,
)


def _harmony(text: str, tools: bool, final: bool) -> Reply:
    """Channels: `analysis` is reasoning, `final` content, and a message `to=functions.NAME` a call."""
    reasoning: list[str] = []
    content: list[str] = []
    calls: list[Call] = []
    for segment in _SEGMENT.finditer(text):
        head, body, open_ = segment["head"], segment["body"], not segment["end"]
        addressee = re.search(r"to=functions\.([\w.-]+)", head)
        if addressee and tools:
            if final or not open_:
                calls.append(Call(addressee[1], body.strip() or "{}"))
            continue
        body = _held_back(body, ("<|end|>", "<|call|>", "<|return|>")) if open_ and not final else body
        (reasoning if "<|channel|>analysis" in head else content).append(body)
    if final and not (reasoning or content or calls):
        return Reply(text)
    return Reply("".join(content), "\n".join(reasoning) or None, calls)
