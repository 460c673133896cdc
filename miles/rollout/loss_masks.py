"""Which tokens of a chat conversation an SFT step learns: what the assistant wrote, for any chat template.

The template is asked, not imitated: the conversation is rendered once, and each assistant message is found in that text by
rendering again with the message's content replaced and looking at what changed. A turn's trained text runs from where
sampling it would have begun (behind what `add_generation_prompt` writes) to its end-of-turn token, which sampling would
have produced.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from miles.rollout.prompts import Message, render_chat

LOSS_MASK_TYPES = ("qwen", "qwen3", "distill_qwen")
_MARK = "⁂⁂"


@dataclass(frozen=True)
class MaskedConversation:
    """Token ids of a conversation and 0/1 for each: 1 where the assistant's own tokens are."""

    token_ids: list[int]
    loss_mask: list[int]


class LossMaskBuilder:
    """Masks for conversations under one tokenizer.

    Args:
        mask_type: `qwen` and `qwen3` train every assistant turn as the template renders it; `distill_qwen` trains the last
            one only, word for word, for templates that would strip its reasoning.
    """

    def __init__(
        self, tokenizer: Any, mask_type: str = "qwen", template_kwargs: Mapping[str, Any] | None = None
    ) -> None:
        if mask_type not in LOSS_MASK_TYPES:
            raise ValueError(f"--loss-mask-type {mask_type}: use one of {', '.join(LOSS_MASK_TYPES)}")
        self.tokenizer, self.mask_type, self.kwargs = tokenizer, mask_type, dict(template_kwargs or {})
        self._special_tokens = [str(token) for token in tokenizer.added_tokens_decoder.values() if token.special]

    def build(self, messages: list[Message], tools: list[dict] | None = None) -> MaskedConversation:
        """Mask one conversation. A message with `step_loss_mask: 0` is not trained.

        Raises: ValueError when there is no assistant turn, or the template leaves one out.
        """
        if not any(m.get("role") == "assistant" for m in messages):
            raise ValueError("the conversation has no assistant message to learn from")
        if self.mask_type == "distill_qwen":
            return self._last_turn_verbatim(messages, tools)
        text = self._render(messages, tools)
        return self._tokenize(text, self._spans(text, messages, tools))

    # ---- rendering -----------------------------------------------------------------------------------------------

    def _render(self, messages: list[Message], tools: list[dict] | None, generation_prompt: bool = False) -> str:
        return render_chat(
            self.tokenizer, messages, tools=tools, add_generation_prompt=generation_prompt, kwargs=self.kwargs
        )

    def _header(self, text: str, messages: list[Message], tools: list[dict] | None) -> str:
        """What the template writes before an assistant's own words; empty where it cannot be told."""
        opened = self._render(messages, tools, generation_prompt=True)
        return opened[len(text) :] if opened.startswith(text) else ""

    def _end_of_turn(self) -> str:
        """What ends an assistant turn, without trailing blanks: `<|im_end|>`, `</s>`, ..."""
        probe = [{"role": "user", "content": "x"}, {"role": "assistant", "content": _MARK}]
        try:
            text = self._render(probe, None)
        except ValueError:
            return self.tokenizer.eos_token or ""
        return text[text.rindex(_MARK) + len(_MARK) :].strip() if _MARK in text else ""

    def _changed(self, text: str, messages: list[Message], at: int, tools: list[dict] | None) -> tuple[int, int, int]:
        """The part of `text` that depends on what message `at` says, and where the next message's own words begin.

        Some templates render a tool result by the call before it; then a variant is taken that keeps the call.
        """
        regions = self._regions(text, messages, at, tools)
        if not regions:
            raise ValueError(
                f"the chat template accepts no other content for assistant message {at}, so it cannot be found"
            )
        following = self._regions(text, messages, at + 1, tools) if at + 1 < len(messages) else []
        limit = min((start for start, _ in following if start >= regions[0][0]), default=len(text))
        start, end = next((region for region in regions if region[1] <= limit), regions[-1])
        return start, min(end, limit), limit

    def _regions(self, text: str, messages: list[Message], at: int, tools: list[dict] | None) -> list[tuple[int, int]]:
        """What changes in `text` with each variant of message `at` that the template accepts."""
        regions = []
        for variant in _variants(messages[at]):
            try:
                other = self._render([*messages[:at], variant, *messages[at + 1 :]], tools)
            except ValueError:
                continue
            start = _common_prefix(text, other)
            regions.append((start, len(text) - _common_prefix(text[start:][::-1], other[start:][::-1])))
        return regions

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

    # ---- spans ---------------------------------------------------------------------------------------------------

    def _spans(self, text: str, messages: list[Message], tools: list[dict] | None) -> list[tuple[int, int]]:
        header, closing = self._header(text, messages, tools), self._end_of_turn()
        spans, floor = [], 0
        for at, message in enumerate(messages):
            if message.get("role") != "assistant":
                continue
            changed_start, changed_end, limit = self._changed(text, messages, at, tools)
            start = self._prompt_end(text, messages[:at], tools, changed_start)
            if start is None:
                start = _after_header(text, header, floor, changed_start)
            end = min(self._turn_end(text, closing, changed_end), limit)
            self._check_rendered(text[start:end], message, last=at == len(messages) - 1, at=at)
            floor = end
            if message.get("step_loss_mask", 1):
                spans.append((start, end))
        return spans

    def _prompt_end(self, text: str, before: list[Message], tools: list[dict] | None, limit: int) -> int | None:
        """Where sampling this turn would have begun, if the conversation so far is rendered the same in `text`."""
        try:
            prompt = self._render(before, tools, generation_prompt=True)
        except ValueError:
            return None  # some templates refuse beginnings of conversations
        return len(prompt) if text.startswith(prompt) and len(prompt) <= limit else None

    def _check_rendered(self, part: str, message: Message, *, last: bool, at: int) -> None:
        """A template that drops what should be learned is an error, not a shorter lesson."""
        content = message.get("content")
        answer = content.rpartition("</think>")[2].strip() if isinstance(content, str) else ""
        if answer and answer not in part:
            raise ValueError(
                f"the chat template does not render the content of assistant message {at}: {answer[:60]!r}"
            )
        reasoning = (message.get("reasoning_content") or "").strip()
        if last and reasoning and reasoning not in part:
            raise ValueError(
                f"the chat template drops reasoning_content of message {at}: put it into content, or use a template that renders it"
            )

    # ---- tokens --------------------------------------------------------------------------------------------------

    def _tokenize(self, text: str, spans: list[tuple[int, int]]) -> MaskedConversation:
        """A token is trained when it begins inside a span: one that straddles the start belongs to the header."""
        encoded = self.tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
        mask, span = [], 0
        for start, end in encoded["offset_mapping"]:
            while span < len(spans) and start >= spans[span][1]:
                span += 1
            inside = span < len(spans) and start >= spans[span][0] and end > start
            mask.append(int(inside))
        return MaskedConversation(encoded["input_ids"], mask)

    def _last_turn_verbatim(self, messages: list[Message], tools: list[dict] | None) -> MaskedConversation:
        if messages[-1].get("role") != "assistant":
            raise ValueError("--loss-mask-type distill_qwen: the conversation must end with an assistant message")
        prompt = self._render(messages[:-1], tools, generation_prompt=True)
        content = messages[-1]["content"] + (self.tokenizer.eos_token or "")
        opening = "<think>"
        if prompt.rstrip().endswith(opening) and content.lstrip().startswith(opening):
            content = content.lstrip()[len(opening) :].lstrip("\n")  # the template has opened the reasoning already
        prompt_ids = self.tokenizer(prompt, add_special_tokens=False)["input_ids"]
        answer_ids = self.tokenizer(content, add_special_tokens=False)["input_ids"]
        return MaskedConversation(prompt_ids + answer_ids, [0] * len(prompt_ids) + [1] * len(answer_ids))


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
