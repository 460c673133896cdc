"""The tokens that a chat template writes between two assistant turns, without touching what was sampled."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from miles.rollout.prompts import Message, render_chat

_MARK = "⁂⁂"


def turn_delta(
    tokenizer: Any,
    sampled: list[int],
    messages: list[Message],
    *,
    tools: list[dict] | None = None,
    kwargs: Mapping[str, Any] | None = None,
) -> list[int]:
    """Ids to append after an assistant turn: its end (as far as it was not sampled), `messages`, the next header.

    The template renders `messages` behind a stand-in conversation, and what follows the stand-in's answer is taken. Sampled
    ids stay as they are; an end-of-turn token that the model sampled itself is not written twice.

    Args:
        sampled: ids of the assistant turn that has just ended.
    Raises: ValueError when the template cannot render these messages after an assistant turn.
    """
    probe = [{"role": "user", "content": "x"}, {"role": "assistant", "content": _MARK}]
    text = render_chat(tokenizer, [*probe, *messages], tools=tools, kwargs=kwargs)
    if _MARK not in text:
        raise ValueError("the chat template does not render assistant turns; multi-turn generation cannot use it")
    tail = text[text.rindex(_MARK) + len(_MARK) :]
    ids = tokenizer(tail, add_special_tokens=False)["input_ids"]
    # The longest end of what was sampled that the tail begins with: usually one end-of-turn token, or nothing.
    longest = next((n for n in range(min(len(ids), len(sampled), 8), 0, -1) if sampled[-n:] == ids[:n]), 0)
    return ids[longest:]
