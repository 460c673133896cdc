"""Asks a template, at startup, whether conversations can be continued by appending to them.

Short conversations with and without reasoning, tool calls and earlier turns are each rendered whole and as history plus suffix.
A role may be appended when the two are the same text in every case.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from miles.rollout.tito.families import ALL_ROLES
from miles.rollout.tito.matchers import Message
from miles.rollout.tito.template import MessageError

if TYPE_CHECKING:
    from miles.rollout.tito.boundary import TitoTokenizer

logger = logging.getLogger(__name__)

_TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": "Looks it up.",
            "parameters": {"type": "object", "properties": {"a": {"type": "string", "description": "What."}}},
        },
    }
    for name in ("get", "find")
]


@dataclass(frozen=True)
class Case:
    """`messages` are appended to `history`, which ends with an assistant's message."""

    name: str
    role: str
    history: list[Message]
    messages: list[Message]
    tools: list[dict[str, Any]] | None = None


def cases() -> Iterator[Case]:
    """Every role after a plain answer, after an answer with reasoning, and after one and two tool calls."""
    ask: Message = {"role": "user", "content": "How much?"}
    system: Message = {"role": "system", "content": "Be brief."}
    for reasoning in (None, "hm"):
        thought = {} if reasoning is None else {"reasoning_content": reasoning}
        label = "with reasoning" if reasoning else "without reasoning"
        said: Message = {"role": "assistant", "content": "Four.", **thought}
        for start in ([ask], [system, ask]):
            plain = [*start, said]
            yield Case(f"a question after an answer {label}", "user", plain, [{"role": "user", "content": "Why?"}])
            yield Case(
                f"a system message after an answer {label}",
                "system",
                plain,
                [{"role": "system", "content": "Now in French."}, {"role": "user", "content": "Why?"}],
            )
            yield Case(
                f"an injected answer after an answer {label}",
                "assistant",
                plain,
                [{"role": "assistant", "content": "Five."}, {"role": "user", "content": "Sure?"}],
            )
            for count in (1, 2):
                called: Message = {"role": "assistant", "content": "", **thought, "tool_calls": _calls(count)}
                results = [
                    {"role": "tool", "content": f"r{i}", "tool_call_id": f"c{i}", "name": _name(i)}
                    for i in range(count)
                ]
                turn = [*start, called]
                yield Case(f"{count} tool results {label}", "tool", turn, results, _TOOLS)
                yield Case(
                    f"a question after {count} tool results {label}", "user", [*turn, *results, said], [ask], _TOOLS
                )


def probe(tokenizer: TitoTokenizer) -> tuple[str, ...]:
    """Roles that may be appended under this template.

    Raises: ValueError when a role that the family promises fails, or, for the default family, when none is sound.
    """
    family = tokenizer.family
    failures = _failures(tokenizer)
    if failures:
        tokenizer.suffix_needs_tools = True
        with_tools = _failures(tokenizer)
        tokenizer.suffix_needs_tools = len(with_tools) < len(failures)
        failures = min(failures, with_tools, key=len)
    roles = tuple(role for role in ALL_ROLES if role not in failures)
    if family.name == "default":
        if not {"tool", "user"} & set(roles):
            raise ValueError(
                "--tito-model default: under this chat template nothing can be appended to a conversation without changing "
                "its beginning; " + "; ".join(failures.values()) + ". Name the model's family with --tito-model"
            )
        if failures:
            logger.warning(
                "--tito-model default: messages that may follow an assistant turn: %s. Not allowed: %s",
                ", ".join(roles),
                "; ".join(failures.values()),
            )
        return roles
    broken = [failures[role] for role in family.append_roles if role in failures and _expressible(failures[role])]
    if broken:
        raise ValueError(
            f"--tito-model {family.name}: this checkpoint's chat template is not the one that the family expects. "
            + "; ".join(broken)
        )
    return tuple(role for role in family.append_roles if role not in failures)


def _failures(tokenizer: TitoTokenizer) -> dict[str, str]:
    """The first case that goes wrong, by role."""
    failures: dict[str, str] = {}
    for case in cases():
        problem = _problem(tokenizer, case)
        if problem is not None:
            failures.setdefault(case.role, f"{case.name}: {problem}")
    return failures


def _expressible(problem: str) -> bool:
    """A template that refuses tools or reasoning outright has no such turns to get wrong."""
    return "refused" not in problem


def _problem(tokenizer: TitoTokenizer, case: Case) -> str | None:
    template = tokenizer.template
    try:
        before = template.render(case.history, case.tools, generation_prompt=False)
        whole = template.render([*case.history, *case.messages], case.tools, generation_prompt=True)
    except MessageError as error:
        return f"the template refused it ({error})"
    if not whole.startswith(before):
        return "the template renders the history differently when it goes on"
    try:
        suffix = tokenizer.suffix_text(case.history[-1], case.messages, case.tools)
    except MessageError as error:
        return f"no suffix could be made ({error})"
    close = tokenizer.close_of(before)
    if before[: len(before) - len(close)] + suffix != whole:
        return "history and suffix are not what the template writes for the whole"
    return None


def _calls(count: int) -> list[dict[str, Any]]:
    return [
        {"id": f"c{i}", "type": "function", "function": {"name": _name(i), "arguments": '{"a": "b"}'}}
        for i in range(count)
    ]


def _name(i: int) -> str:
    return ("get", "find")[i]
