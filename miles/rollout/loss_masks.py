"""Which tokens of a chat conversation an SFT step learns: what the assistant wrote, for any chat template."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from miles.rollout.chat_turns import ChatTurns, Turn
from miles.rollout.prompts import Message

LOSS_MASK_TYPES = ("qwen", "qwen3", "distill_qwen")


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
        self.tokenizer, self.mask_type = tokenizer, mask_type
        self.chat = ChatTurns(tokenizer, template_kwargs)

    def build(self, messages: list[Message], tools: list[dict] | None = None) -> MaskedConversation:
        """Mask one conversation. A message with `step_loss_mask: 0` is not trained.

        Raises: ValueError when there is no assistant turn, or the template leaves one out.
        """
        if not any(m.get("role") == "assistant" for m in messages):
            raise ValueError("the conversation has no assistant message to learn from")
        if self.mask_type == "distill_qwen":
            return self._last_turn_verbatim(messages, tools)
        text, turns = self.chat.find(messages, tools)
        for turn in turns:
            _check_rendered(text[turn.start : turn.end], messages[turn.at], turn.at, last=turn.at == len(messages) - 1)
        return self._tokenize(text, [turn for turn in turns if messages[turn.at].get("step_loss_mask", 1)])

    def _tokenize(self, text: str, turns: list[Turn]) -> MaskedConversation:
        """A token is trained when it begins inside a turn: one that straddles the start belongs to the header."""
        encoded = self.tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
        mask, current = [], 0
        for start, end in encoded["offset_mapping"]:
            while current < len(turns) and start >= turns[current].end:
                current += 1
            mask.append(int(current < len(turns) and turns[current].start <= start < end))
        return MaskedConversation(encoded["input_ids"], mask)

    def _last_turn_verbatim(self, messages: list[Message], tools: list[dict] | None) -> MaskedConversation:
        if messages[-1].get("role") != "assistant":
            raise ValueError("--loss-mask-type distill_qwen: the conversation must end with an assistant message")
        prompt = self.chat.render(messages[:-1], tools, generation_prompt=True)
        content = messages[-1]["content"] + (self.tokenizer.eos_token or "")
        opening = "<think>"
        if prompt.rstrip().endswith(opening) and content.lstrip().startswith(opening):
            content = content.lstrip()[len(opening) :].lstrip("\n")  # the template has opened the reasoning already
        prompt_ids = self.tokenizer(prompt, add_special_tokens=False)["input_ids"]
        answer_ids = self.tokenizer(content, add_special_tokens=False)["input_ids"]
        return MaskedConversation(prompt_ids + answer_ids, [0] * len(prompt_ids) + [1] * len(answer_ids))


def _check_rendered(part: str, message: Message, at: int, *, last: bool) -> None:
    """A template that drops what should be learned is an error, not a shorter lesson."""
    content = message.get("content")
    answer = content.rpartition("</think>")[2].strip() if isinstance(content, str) else ""
    if answer and answer not in part:
        raise ValueError(f"the chat template does not render the content of assistant message {at}: {answer[:60]!r}")
    reasoning = (message.get("reasoning_content") or "").strip()
    if last and reasoning and reasoning not in part:
        raise ValueError(
            f"the chat template drops reasoning_content of message {at}: put it into content, or use a template that renders it"
        )
