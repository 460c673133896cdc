"""A model's chat template with its family's edits: OpenAI messages in, shielded text out."""

from __future__ import annotations

import json
from collections.abc import Container, Mapping, Sequence
from typing import Any

from miles.rollout.prompts import render_chat
from miles.rollout.tito.encoding import Encoder
from miles.rollout.tito.families import Family
from miles.rollout.tito.matchers import Message, text_of

# Their authors are the agent and the model, who may mean `<think>`; tool output and questions come from anywhere.
_OWN_WORDS = ("assistant", "system", "developer")


class MessageError(ValueError):
    """A conversation that cannot be rendered; becomes HTTP 400."""


class ChatTemplate:
    """Renders conversations as one model's template does, old turns as when they were new.

    Args:
        kwargs: arguments of the template for the whole run; the family's pinned ones win and must not be contradicted.
    """

    def __init__(self, tokenizer: Any, family: Family, kwargs: Mapping[str, Any] | None = None) -> None:
        self.tokenizer, self.family = tokenizer, family
        self.encoder = Encoder(tokenizer, (*family.stops, *family.closes, *(family.boundaries or ())))
        self.kwargs = self.merged_kwargs(kwargs or {}, {})
        native = tokenizer.chat_template
        if not isinstance(native, str) or not native:
            raise MessageError(
                "the tokenizer has no chat template, or several: give one with --chat-template-path FILE, or put it into "
                "chat_template.jinja beside the tokenizer"
            )
        for place, becomes in family.edits:
            native = native.replace(place, becomes)
        self._source = native

    def merged_kwargs(self, run: Mapping[str, Any], request: Mapping[str, Any]) -> dict[str, Any]:
        """A request's arguments over the run's. Raises: MessageError where one contradicts what the family pins."""
        out = {**run, **request}
        for name, value in self.family.pinned.items():
            if name in out and out[name] != value:
                raise MessageError(
                    f"chat template argument {name}={out[name]!r}: --tito-model {self.family.name} needs {value!r}, "
                    "because otherwise old turns are rendered differently from new ones"
                )
            out[name] = value
        return out

    def render(
        self,
        messages: Sequence[Message],
        tools: list[dict] | None = None,
        *,
        generation_prompt: bool,
        kwargs: Mapping[str, Any] | None = None,
        sampled: Container[int] = (),
    ) -> str:
        """The conversation as shielded text, for `Encoder.encode`.

        Args:
            sampled: positions of messages that the model itself wrote; special tokens in their text were special tokens.
        Raises: MessageError.
        """
        prepared = [self._prepared(message, shield=i not in sampled) for i, message in enumerate(messages)]
        try:
            return render_chat(
                self.tokenizer,
                prepared,
                tools=[self._shielded(tool, only_control=True) for tool in tools] if tools else None,
                add_generation_prompt=generation_prompt,
                kwargs={**(self.kwargs if kwargs is None else kwargs), "chat_template": self._source},
            )
        except ValueError as error:
            raise MessageError(str(error)) from error

    def _prepared(self, message: Message, *, shield: bool) -> Message:
        role = message["role"]
        out = {key: value for key, value in message.items() if value is not None}
        out["role"] = "system" if role == "developer" and self.family.name != "gptoss" else role
        content = text_of(message.get("content"))
        if content is not None and not isinstance(content, str):
            raise MessageError(
                f"the content of a {role} message has parts that are no text, which sessions do not carry"
            )
        out["content"] = content or ""
        if not out.get("tool_calls"):
            out.pop("tool_calls", None)
        else:
            out["tool_calls"] = [_with_object_arguments(call) for call in out["tool_calls"]]
        if shield:
            out = self._shielded(out, only_control=role in _OWN_WORDS)
        if "reasoning_content" in out:
            out[self.family.reasoning_key] = out.pop("reasoning_content")
        return out

    def _shielded(self, value: Any, *, only_control: bool) -> Any:
        if isinstance(value, str):
            return self.encoder.shield(value, only_control=only_control)
        if isinstance(value, dict):
            return {
                self.encoder.shield(k, only_control=only_control): self._shielded(v, only_control=only_control)
                for k, v in value.items()
            }
        if isinstance(value, list):
            return [self._shielded(one, only_control=only_control) for one in value]
        return value


def _with_object_arguments(call: Any) -> Any:
    """Templates walk through the arguments; clients send them as JSON text."""
    if not isinstance(call, dict) or not isinstance(call.get("function"), dict):
        raise MessageError("a tool call needs a function object with a name and arguments")
    function = {"arguments": {}, **call["function"]}
    if isinstance(function["arguments"], str):
        try:
            parsed = json.loads(function["arguments"] or "{}")
        except (ValueError, RecursionError):
            parsed = None
        # What is no object was never executed; it is rendered, so that the history can go on, as one argument.
        function["arguments"] = parsed if isinstance(parsed, dict) else {"arguments": function["arguments"]}
    return {**{k: v for k, v in call.items() if k != "index"}, "function": function}
