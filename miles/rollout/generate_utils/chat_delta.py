"""The tokens that a chat template writes between two assistant turns, without touching what was sampled."""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping, Sequence
from typing import Any

from miles.rollout.chat_turns import ChatTurns, Turn
from miles.rollout.generate_utils.tool_calls import ToolCall
from miles.rollout.prompts import Message


def tool_messages(calls: Sequence[ToolCall], answers: Sequence[str]) -> tuple[Message, list[Message]]:
    """An assistant message with these calls, and the messages that answer them, in the shape that templates expect."""
    functions = [{"name": c.name or "unknown", "arguments": c.arguments} for c in calls]
    ids = [f"call_{i}" for i in range(len(calls))]
    asked = [{"id": i, "type": "function", "function": f} for i, f in zip(ids, functions, strict=True)]
    results = [
        {"role": "tool", "content": answer, "name": f["name"], "tool_call_id": i}
        for i, f, answer in zip(ids, functions, answers, strict=True)
    ]
    return {"role": "assistant", "content": "", "tool_calls": asked}, results


def turn_delta(
    tokenizer: Any,
    sampled: list[int],
    said: Message,
    messages: list[Message],
    *,
    tools: list[dict] | None = None,
    kwargs: Mapping[str, Any] | None = None,
) -> list[int]:
    """Ids to append after an assistant turn: its end (as far as it was not sampled), `messages`, the next header.

    The template renders `messages` behind a stand-in conversation, and what follows the stand-in's turn is taken. Sampled
    ids stay as they are; an end-of-turn token that the model sampled itself is not written twice.

    Args:
        sampled: ids of the assistant turn that has just ended.
        said: an assistant message like it, calls included: templates render tool results by the call before them.
    Raises: ValueError when the template cannot render these messages after an assistant turn.
    """
    text, turns = _find(ChatTurns(tokenizer, kwargs), said, messages, tools)
    rest = text[turns[-1].end :]
    missing = [m["content"] for m in messages if not _renders(m["content"].strip(), rest)]
    if missing:
        raise ValueError(f"the chat template does not render the message {missing[0][:60]!r} after an assistant turn")
    turn_ids = tokenizer(text[turns[-1].start : turns[-1].end], add_special_tokens=False)["input_ids"]
    rest_ids = tokenizer(rest, add_special_tokens=False)["input_ids"]
    ended = sampled and turn_ids and sampled[-1] == turn_ids[-1]
    return rest_ids if ended else [*turn_ids[-1:], *rest_ids]


def _find(chat: ChatTurns, said: Message, messages: list[Message], tools: list[dict] | None) -> tuple[str, list[Turn]]:
    """The stand-in conversation, with arguments as an object or, for templates that want it, as JSON text."""
    asked = {"role": "user", "content": "x"}
    try:
        return chat.find([asked, said, *messages], tools, generation_prompt=True)
    except ValueError:
        said = copy.deepcopy(said)
        for one in said.get("tool_calls", []):
            one["function"]["arguments"] = json.dumps(one["function"]["arguments"], ensure_ascii=False)
        return chat.find([asked, said, *messages], tools, generation_prompt=True)


def _renders(content: str, text: str) -> bool:
    """Whether a message's content stands in the text, as it is or as a JSON string."""
    return any(
        form in text for form in (content, json.dumps(content)[1:-1], json.dumps(content, ensure_ascii=False)[1:-1])
    )
