"""OpenAI chat completions: the request policy, and answers whole or as they grow."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from typing import Any

import orjson

from miles.rollout.session.errors import RequestRefused
from miles.rollout.session.turns import Answer, ChatRequest
from miles.rollout.tito.matchers import Message, text_of
from miles.rollout.tito.replies import Reply

_PLAIN = {"role", "content"}
_ROLES = ("system", "developer", "user", "assistant", "tool")

# OpenAI's name -> the engine's
_SAMPLING = {"seed": "sampling_seed", "min_tokens": "min_new_tokens"} | {
    name: name
    for name in (
        "temperature", "top_p", "top_k", "min_p", "stop", "presence_penalty", "frequency_penalty", "repetition_penalty",
        "logit_bias", "stop_token_ids", "ignore_eos", "sampling_seed",
    )
}  # fmt: skip
_TOKENS = {
    "input_ids", "prompt_token_ids", "prompt_ids", "token_ids", "output_ids", "input_embeds", "logprob_start_len",
    "routed_experts_start_len", "token_ids_logprob", "session_params", "session_id", "prompt", "text", "continue_final_message",
    "add_generation_prompt",
}  # fmt: skip
_IGNORED = {
    "model", "user", "metadata", "store", "parallel_tool_calls", "service_tier", "priority", "reasoning_effort", "verbosity",
    "skip_special_tokens", "spaces_between_special_tokens", "no_stop_trim", "separate_reasoning", "stream_reasoning", "top_logprobs",
    "return_meta_info", "return_routed_experts", "safety_identifier", "prompt_cache_key", "return_indexer_topk",
}  # fmt: skip
_READ = {
    "messages", "tools", "tool_choice", "chat_template_kwargs", "max_tokens", "max_completion_tokens", "stream", "stream_options", "n",
    "logprobs", "response_format",
}  # fmt: skip


def parse_chat(body: Any) -> ChatRequest:
    """Raises: RequestRefused that lists everything wrong with the body."""
    if not isinstance(body, dict):
        raise RequestRefused(f"the body must be a JSON object, not a {type(body).__name__}")
    problems = _field_problems(body)
    messages = body.get("messages")
    if not isinstance(messages, list) or not messages:
        problems.append("messages must be a list of at least one message")
        messages = []
    for i, message in enumerate(messages):
        problems += [f"message {i}: {problem}" for problem in message_problems(message)]
    tools = body.get("tools") or None
    if tools is not None and not (isinstance(tools, list) and all(map(_is_tool, tools))):
        problems.append("tools must be a list of {type: function, function: {name, ...}}")
    if problems:
        raise RequestRefused("; ".join(problems))
    limit = body.get("max_completion_tokens")
    return ChatRequest(
        messages=[plain_message(m) for m in messages],
        tools=tools,
        template_kwargs=body.get("chat_template_kwargs") or {},
        sampling={target: body[name] for name, target in _SAMPLING.items() if body.get(name) is not None},
        max_tokens=body.get("max_tokens") if limit is None else limit,
        use_tools=body.get("tool_choice") != "none",
    )


def _field_problems(body: dict[str, Any]) -> list[str]:
    given = {name for name, value in body.items() if value is not None}
    problems = []
    tokens = sorted(given & _TOKENS)
    if tokens:
        problems.append(f"{', '.join(tokens)}: the server owns the tokens of a session; send messages only")
    unknown = sorted(given - _TOKENS - _IGNORED - _READ - set(_SAMPLING))
    if unknown:
        problems.append(f"unknown or unsupported fields {', '.join(unknown)}")
    if body.get("n") not in (None, 1):
        problems.append(f"n={body['n']}: a session has one answer a request")
    if (body.get("response_format") or {"type": "text"}) != {"type": "text"}:
        problems.append("response_format other than text is not supported")
    if body.get("tool_choice") not in (None, "auto", "none"):
        problems.append("tool_choice other than auto and none is not supported")
    if not isinstance(body.get("chat_template_kwargs") or {}, dict):
        problems.append("chat_template_kwargs must be an object")
    for name in ("max_tokens", "max_completion_tokens"):
        if body.get(name) is not None and (type(body[name]) is not int or body[name] < 1):
            problems.append(f"{name} must be a positive integer")
    return problems


def message_problems(message: Any) -> list[str]:
    """What keeps a message from being rendered."""
    if not isinstance(message, dict):
        return ["must be an object"]
    if message.keys() == _PLAIN and message["role"] in _ROLES and type(message["content"]) is str:
        return []  # most are like this
    role, problems = message.get("role"), []
    if role not in _ROLES:
        problems.append(f"unknown role {role!r}; known: {', '.join(_ROLES)}")
    content = text_of(message.get("content"))
    if isinstance(content, list):
        kinds = {part.get("type", "?") if isinstance(part, dict) else type(part).__name__ for part in content}
        other = ", ".join(sorted(str(kind) for kind in kinds - {"text"})) or "text parts without text"
        problems.append(f"content has {other}; sessions carry text only")
    elif content is not None and not isinstance(content, str):
        problems.append(f"content must be text, not a {type(content).__name__}")
    calls = message.get("tool_calls")
    if calls and not (isinstance(calls, list) and all(map(_is_call, calls))):
        problems.append("tool_calls must be a list of {id, type, function: {name, arguments}}")
    for name in ("reasoning_content", "name", "tool_call_id"):
        if not isinstance(message.get(name), str | None):
            problems.append(f"{name} must be text")
    return problems


def plain_message(message: Message) -> Message:
    """A message whose content is text or None; `reasoning` is another name of `reasoning_content`."""
    out = message
    if isinstance(message.get("content"), list):
        out = {**out, "content": text_of(message["content"])}
    if "reasoning" in out and isinstance(out["reasoning"], str) and not out.get("reasoning_content"):
        out = {k: v for k, v in out.items() if k != "reasoning"} | {"reasoning_content": out["reasoning"]}
    return out


def _is_tool(tool: Any) -> bool:
    function = tool.get("function") if isinstance(tool, dict) else None
    return isinstance(function, dict) and isinstance(function.get("name"), str)


def _is_call(call: Any) -> bool:
    return _is_tool(call) and isinstance(call["function"].get("arguments", ""), str | dict | None)


# ---- answers -----------------------------------------------------------------------------------------------------------


def completion(answer: Answer, model: str, *, logprobs: list[dict[str, Any]] | None = None) -> dict[str, Any]:
    choice: dict[str, Any] = {
        "index": 0,
        "message": answer.message,
        "finish_reason": answer.finish_reason,
        "logprobs": None if logprobs is None else {"content": logprobs},
    }
    return _head(answer.id, model, "chat.completion") | {"choices": [choice], "usage": usage(answer)}


def usage(answer: Answer) -> dict[str, Any]:
    return {
        "prompt_tokens": answer.prompt_tokens,
        "completion_tokens": answer.completion_tokens,
        "total_tokens": answer.prompt_tokens + answer.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": answer.cached_tokens},
    }


def token_logprobs(answer: Answer, decode: Any) -> list[dict[str, Any]]:
    """OpenAI's `logprobs.content`."""
    out = []
    for token, value in zip(answer.turn.output_ids.tolist(), answer.turn.log_probs.tolist(), strict=True):
        text = decode([token])
        out.append({"token": text, "bytes": list(text.encode()), "logprob": value, "top_logprobs": []})
    return out


def _head(id: str, model: str, kind: str) -> dict[str, Any]:
    return {"id": id, "object": kind, "created": int(time.time()), "model": model}


async def chunks(
    parts: AsyncIterator[Reply | Answer], id: str, model: str, include_usage: bool
) -> AsyncIterator[bytes]:
    """Server-sent events: each part of a reply as soon as nothing can change it, then usage, then `[DONE]`."""
    sent = Sent()
    yield _event(id, model, {"role": "assistant", "content": ""})
    async for part in parts:
        if isinstance(part, Answer):
            for delta in sent.rest(part.reply, part.message):
                yield _event(id, model, delta)
            yield _event(id, model, {}, finish=part.finish_reason)
            if include_usage:
                head = _head(id, model, "chat.completion.chunk")
                yield b"data: " + orjson.dumps(head | {"choices": [], "usage": usage(part)}) + b"\n\n"
            yield b"data: [DONE]\n\n"
            return
        for delta in sent.news(part):
            yield _event(id, model, delta)


class Sent:
    """What of a growing reply has gone out."""

    def __init__(self) -> None:
        self.reasoning = self.content = 0
        self.calls = 0

    def news(self, reply: Reply) -> list[dict[str, Any]]:
        """Deltas of text that is new. Calls wait for the whole reply, which gives them their ids."""
        out: list[dict[str, Any]] = []
        reasoning, content = (reply.reasoning or "")[self.reasoning :], reply.content[self.content :]
        self.reasoning += len(reasoning)
        self.content += len(content)
        if reasoning:
            out.append({"reasoning_content": reasoning})
        if content:
            out.append({"content": content})
        return out

    def rest(self, reply: Reply, message: Message) -> list[dict[str, Any]]:
        """What is left at the end: the last text, and each call as its name and then its arguments."""
        out = self.news(reply)
        for i, call in enumerate(message.get("tool_calls") or ()):
            function = call["function"]
            out.append(
                {"tool_calls": [{"index": i, "id": call["id"], "type": "function",
                                 "function": {"name": function["name"], "arguments": ""}}]}
            )  # fmt: skip
            out.append({"tool_calls": [{"index": i, "function": {"arguments": function["arguments"]}}]})
        return out


def _event(id: str, model: str, delta: dict[str, Any], finish: str | None = None) -> bytes:
    choice = {"index": 0, "delta": delta, "finish_reason": finish, "logprobs": None}
    return b"data: " + orjson.dumps(_head(id, model, "chat.completion.chunk") | {"choices": [choice]}) + b"\n\n"
