"""Anthropic messages: the same conversations in other words. Both become one `ChatRequest`, so both get the same tokens."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

import orjson
from starlette.requests import Request
from starlette.responses import Response

from miles.rollout.session.chat_api import Sent, message_problems
from miles.rollout.session.errors import RequestRefused
from miles.rollout.session.http import (
    Handler,
    Service,
    as_session_error,
    begun_stream,
    event_stream,
    generate_or_leave,
    json_body,
    reply,
)
from miles.rollout.session.turns import Answer, ChatRequest
from miles.rollout.tito.matchers import Message
from miles.rollout.tito.replies import Reply

_SAMPLING = {
    "temperature": "temperature",
    "top_p": "top_p",
    "top_k": "top_k",
    "stop_sequences": "stop",
    "seed": "sampling_seed",
}
_READ = {"model", "max_tokens", "messages", "system", "tools", "tool_choice", "stream", "chat_template_kwargs"}
# Hints that change nothing here: `thinking` is the template's matter.
_IGNORED = {
    "metadata",
    "thinking",
    "service_tier",
    "context_management",
    "cache_control",
    "output_config",
    "inference_geo",
}
_RAW = "_raw_arguments"  # holds arguments that are no JSON object, which Anthropic's `input` must be
_STOP_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}
_ERROR_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
}


def parse_messages(body: Any) -> ChatRequest:
    """Raises: RequestRefused that lists everything wrong with the body."""
    if not isinstance(body, dict):
        raise RequestRefused(f"the body must be a JSON object, not a {type(body).__name__}")
    given = {name for name, value in body.items() if value is not None}
    problems = []
    unknown = sorted(given - _READ - _IGNORED - set(_SAMPLING))
    if unknown:
        problems.append(f"unknown or unsupported fields {', '.join(unknown)}: the server owns the tokens of a session")
    if type(body.get("max_tokens")) is not int or body["max_tokens"] < 1:
        problems.append("max_tokens must be a positive integer")
    choice = (
        (body.get("tool_choice") or {}).get("type", "auto") if isinstance(body.get("tool_choice") or {}, dict) else "?"
    )
    if choice not in ("auto", "none"):
        problems.append(f"tool_choice {choice} is not supported: use auto or none")
    messages: list[Message] = []
    system = body.get("system")
    if system:
        text = _text(system, problems, "system")
        messages.append({"role": "system", "content": text})
    turns = body.get("messages")
    if not isinstance(turns, list) or not turns:
        problems.append("messages must be a list of at least one message")
        turns = []
    for i, turn in enumerate(turns):
        messages += _converted(turn, problems, f"message {i}")
    tools = _tools(body.get("tools") or [], problems)
    problems += [f"message {i}: {p}" for i, message in enumerate(messages) for p in message_problems(message)]
    if problems:
        raise RequestRefused("; ".join(problems))
    return ChatRequest(
        messages=messages,
        tools=tools or None,
        template_kwargs=body.get("chat_template_kwargs") or {},
        sampling={target: body[name] for name, target in _SAMPLING.items() if body.get(name) is not None},
        max_tokens=body["max_tokens"],
        use_tools=choice != "none",
    )


def _converted(turn: Any, problems: list[str], where: str) -> list[Message]:
    if not isinstance(turn, dict) or turn.get("role") not in ("user", "assistant", "system"):
        problems.append(f"{where}: must have the role user or assistant")
        return []
    content = turn.get("content")
    blocks = [{"type": "text", "text": content}] if isinstance(content, str) else content
    if not isinstance(blocks, list) or not all(isinstance(block, dict) for block in blocks):
        problems.append(f"{where}: content must be text or a list of blocks")
        return []
    allowed = {"text", "thinking", "tool_use"} if turn["role"] == "assistant" else {"text", "tool_result"}
    other = sorted({str(block.get("type")) for block in blocks} - allowed)
    if other:
        problems.append(f"{where}: {', '.join(other)} blocks are not supported in a {turn['role']} message")
        return []
    return [_assistant(blocks)] if turn["role"] == "assistant" else _user(turn["role"], blocks, problems, where)


def _assistant(blocks: list[dict[str, Any]]) -> Message:
    message: Message = {"role": "assistant", "content": _joined(blocks, "text", "text") or None}
    thought = [str(block.get("thinking", "")) for block in blocks if block["type"] == "thinking"]
    if thought:
        message["reasoning_content"] = "\n".join(thought)
    calls = [block for block in blocks if block["type"] == "tool_use"]
    if calls:
        message["tool_calls"] = [
            {
                "id": call.get("id"),
                "type": "function",
                "function": {"name": call.get("name"), "arguments": _arguments(call.get("input"))},
            }
            for call in calls
        ]
    return message


def _user(role: str, blocks: list[dict[str, Any]], problems: list[str], where: str) -> list[Message]:
    """Tool results first, each a message of its own, then what the user says."""
    out: list[Message] = [
        {
            "role": "tool",
            "tool_call_id": str(block.get("tool_use_id")),
            "content": _text(block.get("content") or "", problems, where),
        }
        for block in blocks
        if block["type"] == "tool_result"
    ]
    if any(block["type"] == "text" for block in blocks) or not out:
        out.append({"role": role, "content": _joined(blocks, "text", "text")})
    return out


def _joined(blocks: list[dict[str, Any]], kind: str, name: str) -> str:
    return "".join(str(block.get(name) or "") for block in blocks if block["type"] == kind)


def _text(content: Any, problems: list[str], where: str) -> str:
    if isinstance(content, str):
        return content
    if isinstance(content, list) and all(isinstance(b, dict) and b.get("type") == "text" for b in content):
        return _joined(content, "text", "text")
    problems.append(f"{where}: only text is supported")
    return ""


def _arguments(value: Any) -> str:
    if isinstance(value, dict) and list(value) == [_RAW]:
        return value[_RAW]
    return json.dumps(value if value is not None else {}, ensure_ascii=False)


def _tools(tools: Any, problems: list[str]) -> list[dict[str, Any]]:
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        problems.append("tools must be a list of objects")
        return []
    server = [str(tool.get("type")) for tool in tools if tool.get("type") not in (None, "custom")]
    if server:
        problems.append(f"tools that run on the server are not supported: {', '.join(server)}")
    out = []
    for tool in tools:
        function = {"name": tool.get("name"), "description": tool.get("description")}
        function["parameters"] = tool.get("input_schema") or {"type": "object", "properties": {}}
        out.append({"type": "function", "function": {k: v for k, v in function.items() if v is not None}})
    return out


# ---- answers -----------------------------------------------------------------------------------------------------------


def message_of(answer: Answer, model: str) -> dict[str, Any]:
    blocks: list[dict[str, Any]] = []
    if answer.reply.reasoning:
        blocks.append({"type": "thinking", "thinking": answer.reply.reasoning, "signature": ""})
    if answer.reply.content:
        blocks.append({"type": "text", "text": answer.reply.content})
    blocks += [_tool_use(call) for call in answer.message.get("tool_calls") or ()]
    return _head(answer.id, model) | {
        "content": blocks,
        "stop_reason": _STOP_REASONS.get(answer.finish_reason, "end_turn"),
        "usage": _usage(answer),
    }


def _tool_use(call: dict[str, Any]) -> dict[str, Any]:
    return {"type": "tool_use", "id": call["id"], "name": call["function"]["name"], "input": _input(call)}


def _input(call: dict[str, Any]) -> dict[str, Any]:
    text = call["function"]["arguments"]
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        value = None
    return value if isinstance(value, dict) else {_RAW: text}


def _usage(answer: Answer) -> dict[str, int]:
    return {
        "input_tokens": answer.prompt_tokens - answer.cached_tokens,
        "cache_read_input_tokens": answer.cached_tokens,
        "cache_creation_input_tokens": 0,
        "output_tokens": answer.completion_tokens,
    }


def _head(id: str, model: str) -> dict[str, Any]:
    return {
        "id": id,
        "type": "message",
        "role": "assistant",
        "model": model,
        "content": [],
        "stop_reason": None,
        "stop_sequence": None,
        "usage": {"input_tokens": 0, "output_tokens": 0},
    }


class _Blocks:
    """Content blocks of a stream: one open at a time."""

    def __init__(self) -> None:
        self.index, self.kind = -1, ""

    def delta(self, kind: str, delta: dict[str, Any], block: dict[str, Any]) -> list[bytes]:
        events = []
        if self.kind != kind:
            events += self.close()
            self.index, self.kind = self.index + 1, kind
            events.append(_event("content_block_start", index=self.index, content_block=block))
        events.append(_event("content_block_delta", index=self.index, delta=delta))
        return events

    def close(self) -> list[bytes]:
        if not self.kind:
            return []
        self.kind = ""
        return [_event("content_block_stop", index=self.index)]


async def events(parts: AsyncIterator[Reply | Answer], id: str, model: str) -> AsyncIterator[bytes]:
    """Anthropic's stream: blocks grow as the reply does; calls come whole at its end."""
    sent, blocks = Sent(), _Blocks()
    yield _event("message_start", message=_head(id, model))
    async for part in parts:
        done = isinstance(part, Answer)
        reply = part.reply if isinstance(part, Answer) else part
        for delta in sent.news(reply):
            for event in _text_events(blocks, delta):
                yield event
        if not done:
            continue
        assert isinstance(part, Answer)
        for n, call in enumerate(part.message.get("tool_calls") or ()):
            block = _tool_use(call)
            arguments = {"type": "input_json_delta", "partial_json": json.dumps(block["input"], ensure_ascii=False)}
            for event in blocks.delta(f"tool_use {n}", arguments, block | {"input": {}}):
                yield event
        for event in blocks.close():
            yield event
        stop = {"stop_reason": _STOP_REASONS.get(part.finish_reason, "end_turn"), "stop_sequence": None}
        yield _event("message_delta", delta=stop, usage=_usage(part))
        yield _event("message_stop")


def _text_events(blocks: _Blocks, delta: dict[str, Any]) -> list[bytes]:
    if "reasoning_content" in delta:
        thinking = {"type": "thinking_delta", "thinking": delta["reasoning_content"]}
        return blocks.delta("thinking", thinking, {"type": "thinking", "thinking": "", "signature": ""})
    return blocks.delta("text", {"type": "text_delta", "text": delta["content"]}, {"type": "text", "text": ""})


def _event(kind: str, **fields: Any) -> bytes:
    return f"event: {kind}\n".encode() + b"data: " + orjson.dumps({"type": kind, **fields}) + b"\n\n"


# ---- the endpoint ------------------------------------------------------------------------------------------------------


def error_content(status: int, text: str) -> dict[str, Any]:
    return {"type": "error", "error": {"type": _ERROR_TYPES.get(status, "api_error"), "message": text}}


def messages_guarded(handler: Handler) -> Handler:
    async def call(http: Request) -> Response:
        try:
            return await handler(http)
        except Exception as error:
            status, text, retryable = as_session_error(error)
            return reply(error_content(status, text), status, None if retryable else {"x-should-retry": "false"})

    return call


def messages(service: Service) -> Handler:
    def on_error(error: Exception) -> bytes:
        status, text, _ = as_session_error(error)
        return _event("error", **{k: v for k, v in error_content(status, text).items() if k != "type"})

    async def handler(http: Request) -> Response:
        session = service.session(http)
        body = await json_body(http, service.config.max_body_bytes)
        prepared = service.recorder.prepare(session, parse_messages(body))
        model = body.get("model") or "policy"
        if body.get("stream"):
            parts = await begun_stream(service, session, prepared)
            return event_stream(events(parts, f"chatcmpl-{prepared.payload['rid']}", model), on_error)
        answer = await generate_or_leave(service, http, session, prepared)
        if answer is None:
            return reply(error_content(499, "the client closed the connection"), 499)
        return reply(message_of(answer, model))

    return handler
