"""Where each assistant turn stands in a rendered conversation, for any chat template.

The template is asked, not imitated: the conversation is rendered once, and each assistant message is found in that text by
rendering again with the message saying something else and looking at what changed. A turn runs from where sampling it would
have begun (behind what `add_generation_prompt` writes) to its end-of-turn token, which sampling would have produced.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from miles.rollout.prompts import Message, render_chat

_MARK = "⁂⁂"


@dataclass(frozen=True)
class Turn:
    """Characters `[start, end)` of the text are what the assistant wrote as message `at`."""

    at: int
    start: int
    end: int


class ChatTurns:
    """Finds assistant turns under one tokenizer's template."""

    def __init__(self, tokenizer: Any, template_kwargs: Mapping[str, Any] | None = None) -> None:
        self.tokenizer, self.kwargs = tokenizer, dict(template_kwargs or {})
        self._special_tokens = [str(token) for token in tokenizer.added_tokens_decoder.values() if token.special]

    def render(self, messages: list[Message], tools: list[dict] | None, generation_prompt: bool = False) -> str:
        return render_chat(
            self.tokenizer, messages, tools=tools, add_generation_prompt=generation_prompt, kwargs=self.kwargs
        )

    def find(
        self, messages: list[Message], tools: list[dict] | None = None, generation_prompt: bool = False
    ) -> tuple[str, list[Turn]]:
        """The conversation as text, and its assistant turns in order.

        Raises: ValueError when the template refuses the conversation, or a message cannot be found in the text.
        """
        text = self.render(messages, tools, generation_prompt)
        header, closing = self._header(messages, tools), self._end_of_turn()
        turns: list[Turn] = []
        for at, message in enumerate(messages):
            if message.get("role") != "assistant":
                continue
            changed = _Search(self, text, messages, tools, generation_prompt).changed(at)
            start = self._prompt_end(text, messages[:at], tools, changed.start)
            if start is None:
                start = _after_header(text, header, turns[-1].end if turns else 0, changed.start)
            end = min(self._turn_end(text, closing, changed.end), changed.limit)
            turns.append(Turn(at, start, end))
        return text, turns

    def _header(self, messages: list[Message], tools: list[dict] | None) -> str:
        """What the template writes before an assistant's own words; empty where it cannot be told."""
        text, opened = (self.render(messages, tools, generation_prompt=open_) for open_ in (False, True))
        return opened[len(text) :] if opened.startswith(text) else ""

    def _end_of_turn(self) -> str:
        """What ends an assistant turn, without trailing blanks: `<|im_end|>`, `</s>`, ..."""
        probe = [{"role": "user", "content": "x"}, {"role": "assistant", "content": _MARK}]
        try:
            text = self.render(probe, None)
        except ValueError:
            return self.tokenizer.eos_token or ""
        return text[text.rindex(_MARK) + len(_MARK) :].strip() if _MARK in text else ""

    def _prompt_end(self, text: str, before: list[Message], tools: list[dict] | None, limit: int) -> int | None:
        """Where sampling this turn would have begun, if the conversation so far is rendered the same in `text`."""
        try:
            prompt = self.render(before, tools, generation_prompt=True)
        except ValueError:
            return None  # some templates refuse beginnings of conversations
        return len(prompt) if text.startswith(prompt) and len(prompt) <= limit else None

    def _turn_end(self, text: str, closing: str, changed_end: int) -> int:
        """Behind the token that ends the turn: the usual one, else the next special token of whatever kind."""
        blanks = len(text) - changed_end - len(text[changed_end:].lstrip())
        if closing and text.startswith(closing, changed_end + blanks):
            return changed_end + blanks + len(closing)
        for token in self._special_tokens:
            at = text.find(token, max(0, changed_end - len(token)))
            if 0 <= at < changed_end:  # this turn's end differs from the usual one, and so belongs to what changed
                return at + len(token)
        ends = [at + len(token) for token in self._special_tokens if (at := text.find(token, changed_end)) >= 0]
        return min(ends, default=changed_end)


@dataclass(frozen=True)
class _Changed:
    """What depends on a message is `[start, end)`; the next message's own words begin at `limit`."""

    start: int
    end: int
    limit: int


@dataclass(frozen=True)
class _Search:
    chat: ChatTurns
    text: str
    messages: list[Message]
    tools: list[dict] | None
    generation_prompt: bool

    def changed(self, at: int) -> _Changed:
        """The part of the text that depends on what message `at` says.

        Some templates render a tool result by the call before it; then a variant is taken that keeps the call.
        """
        regions = self._regions(at)
        if not regions:
            raise ValueError(
                f"the chat template accepts no other content for assistant message {at}, so it cannot be found"
            )
        following = self._regions(at + 1) if at + 1 < len(self.messages) else []
        limit = min((start for start, _ in following if start >= regions[0][0]), default=len(self.text))
        start, end = next((region for region in regions if region[1] <= limit), regions[-1])
        return _Changed(start, min(end, limit), limit)

    def _regions(self, at: int) -> list[tuple[int, int]]:
        """What changes with each variant of message `at` that the template accepts."""
        regions = []
        for variant in _variants(self.messages[at]):
            messages = [*self.messages[:at], variant, *self.messages[at + 1 :]]
            try:
                other = self.chat.render(messages, self.tools, self.generation_prompt)
            except ValueError:
                continue
            start = _common_prefix(self.text, other)
            regions.append((start, len(self.text) - _common_prefix(self.text[start:][::-1], other[start:][::-1])))
        return regions


def _variants(message: Message) -> list[Message]:
    """The message saying something else: nothing but a mark, or, where its tool calls must stay, other arguments."""
    content = [{"type": "text", "text": _MARK}] if isinstance(message.get("content"), list) else _MARK
    plain = {k: v for k, v in message.items() if k not in ("reasoning_content", "tool_calls")} | {"content": content}
    if not message.get("tool_calls"):
        return [plain]
    calls = copy.deepcopy(message["tool_calls"])
    for call in calls:
        function = call.get("function", call)
        other = {_MARK: _MARK}
        function["arguments"] = json.dumps(other) if isinstance(function.get("arguments"), str) else other
    return [plain, {**message, "tool_calls": calls}]


def _common_prefix(a: str, b: str) -> int:
    limit = min(len(a), len(b))
    return next((i for i in range(limit) if a[i] != b[i]), limit)


def _after_header(text: str, header: str, floor: int, changed_start: int) -> int:
    """Where the assistant's words begin: behind the longest beginning of `header` found before what changed.

    Older turns may be rendered without the end of the header (an opened `<think>`, say), hence not always all of it.
    """
    for cut in range(len(header), 0, -1):
        found = text.rfind(header[:cut], floor, changed_start)
        if found >= 0:
            return found + cut
    return changed_start
