"""The tokens between what a model sampled and what it samples next.

A turn's row is never rendered again. Only the appended messages are, behind a stand-in conversation that ends in an assistant
message like the last one, so the cost is that of the new text alone. What the template writes from the end of that message
on, its closing token included, is joined to the row:

    row ends with the closing token       it is there already: the rest is appended      (Qwen: a newline, then the message)
    row ends with another stop token      the sampled one is dropped, all is appended    (GLM: `<|observation|>`, then a user)
    row ends without a stop token         all is appended: the turn is closed for it     (a stop string ended the turn)
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from miles.rollout.tito.families import Family
from miles.rollout.tito.matchers import Message
from miles.rollout.tito.template import ChatTemplate, MessageError

_CLOSING_MARK = "⁂⁂"


@dataclass(frozen=True)
class Suffix:
    """Tokens `ids` go behind a row of which the last `drop` tokens are left out (0 or 1)."""

    ids: list[int]
    drop: int = 0


class TitoTokenizer:
    """Prompts of a session: the first one whole, each later one as the row so far and a suffix.

    Args:
        kwargs: `--apply-chat-template-kwargs`.
        eos_ids: tokens at which the engine stops besides the family's, as generation_config.json has them.
    Attributes:
        stop_ids: tokens at which engines must end a turn.
        end_ids: tokens with which a turn ends, in a row or in a history.
        append_roles: roles that the probe found to be appended soundly.
    Raises: ValueError when the template is not append-only for a role that the family promises.
    """

    def __init__(
        self, tokenizer: Any, family: Family, kwargs: Mapping[str, Any] | None = None, eos_ids: Iterable[int] = ()
    ) -> None:
        from miles.rollout.tito.probe import probe

        self.tokenizer, self.family = tokenizer, family
        self.template = ChatTemplate(tokenizer, family, kwargs)
        self.encoder = self.template.encoder
        self.stop_ids = self._stop_ids(eos_ids)
        known = self.encoder.special_ids
        self.end_ids = self.stop_ids | {known[token] for token in family.closes if token in known}
        closes = {self.encoder.decode([i]) for i in self.end_ids}
        self._closes = sorted(closes | ({self._usual_close()} - {""}), key=len, reverse=True)
        self._stand_ins: dict[tuple, tuple[list[Message], str]] = {}
        self.suffix_needs_tools = False
        self.append_roles = probe(self)

    def prompt_ids(
        self, messages: Sequence[Message], tools: list[dict] | None = None, kwargs: Mapping[str, Any] | None = None
    ) -> list[int]:
        """A whole conversation and the opener of the next assistant turn. Raises: MessageError."""
        return self.encoder.encode(self.template.render(messages, tools, generation_prompt=True, kwargs=kwargs))

    def suffix(
        self,
        row_end: int | None,
        last: Message,
        messages: Sequence[Message],
        tools: list[dict] | None = None,
        kwargs: Mapping[str, Any] | None = None,
    ) -> Suffix:
        """What follows a turn: its end as far as it was not sampled, `messages`, the opener of the next turn.

        Args:
            row_end: the last sampled token.
            last: the assistant message that ended the row; templates render tool results by its calls.
        Raises: MessageError for a role that cannot be appended, and where the template refuses.
        """
        wrong = sorted({m["role"] for m in messages} - set(self.append_roles) - self._aliases())
        if wrong:
            raise MessageError(
                f"a {wrong[0]} message cannot be appended after an assistant turn with --tito-model {self.family.name}; "
                f"allowed: {', '.join(self.append_roles)}"
            )
        ids = self.encoder.encode(self.suffix_text(last, messages, tools, kwargs))
        if row_end in self.end_ids and ids:
            return Suffix(ids[1:]) if ids[0] == row_end else Suffix(ids, drop=1)
        return Suffix(ids)

    def suffix_text(
        self,
        last: Message,
        messages: Sequence[Message],
        tools: list[dict] | None = None,
        kwargs: Mapping[str, Any] | None = None,
        *,
        generation_prompt: bool = True,
    ) -> str:
        """Shielded text from the closing token of an assistant message like `last` on."""
        tools = tools if self.suffix_needs_tools else None
        stand_in, text = self._stand_in(last, tools, kwargs)
        longer = self.template.render([*stand_in, *messages], tools, generation_prompt=generation_prompt, kwargs=kwargs)
        if not longer.startswith(text):
            raise MessageError("the chat template renders an assistant turn differently when messages follow it")
        return self.close_of(text) + longer[len(text) :]

    def opener(self, kwargs: Mapping[str, Any] | None = None) -> str:
        """What the template writes to begin an assistant turn, `<think>` included where it opens the reasoning."""
        base: list[Message] = [{"role": "user", "content": "x"}]
        closed, opened = (self.template.render(base, generation_prompt=g, kwargs=kwargs) for g in (False, True))
        return opened[len(closed) :] if opened.startswith(closed) else ""

    # ---- how turns end ---------------------------------------------------------------------------------------------

    def _stop_ids(self, eos_ids: Iterable[int]) -> frozenset[int]:
        known = self.encoder.special_ids
        ids = {known[token] for token in self.family.stops if token in known}
        if self.family.stops and not ids:
            raise ValueError(
                f"--tito-model {self.family.name}: the tokenizer has none of {', '.join(self.family.stops)}; "
                "is this the model's family?"
            )
        eos = self.tokenizer.eos_token_id
        return frozenset(ids | set(eos_ids) | ({eos} - {None}))

    def _usual_close(self) -> str:
        """The special token that the template itself writes behind an assistant's words; empty where it writes none."""
        text = self.template.render(
            [{"role": "user", "content": "x"}, {"role": "assistant", "content": _CLOSING_MARK}], generation_prompt=False
        )
        rest = text.rpartition(_CLOSING_MARK)[2]
        return next((s for s in self.encoder.special_ids if rest.lstrip().startswith(s)), "")

    def close_of(self, text: str) -> str:
        """What ends the last message of a rendered text, blanks included; empty where nothing does."""
        for close in self._closes:
            at = text.rfind(close)
            if at >= 0 and not text[at + len(close) :].strip():
                return text[at:]
        return ""

    def _stand_in(
        self, last: Message, tools: list[dict] | None, kwargs: Mapping[str, Any] | None
    ) -> tuple[list[Message], str]:
        """A short conversation that ends in an assistant message with the calls of `last`, and its text."""
        calls = last.get("tool_calls") or []
        key = (
            tuple((call.get("id"), call["function"].get("name")) for call in calls),
            repr(tools) if tools else None,
            repr(sorted(kwargs.items())) if kwargs else None,
        )
        found = self._stand_ins.get(key)
        if found is None:
            said: Message = {"role": "assistant", "content": "" if calls else "x"}
            if calls:
                said["tool_calls"] = [_without_arguments(call) for call in calls]
            messages = [{"role": "user", "content": "x"}, said]
            found = messages, self.template.render(messages, tools, generation_prompt=False, kwargs=kwargs)
            if len(self._stand_ins) >= 256:
                self._stand_ins.clear()
            self._stand_ins[key] = found
        return found

    def _aliases(self) -> set[str]:
        return {"developer"} if "system" in self.append_roles else set()


def _without_arguments(call: dict[str, Any]) -> dict[str, Any]:
    function: dict[str, Any] = {"name": call["function"].get("name") or "", "arguments": {}}
    return {k: v for k, v in call.items() if k in ("id", "type")} | {"function": function}
