"""`/v1/chat/completions`: the same requests as `/generate`, in OpenAI's words."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from typing import Any

import orjson
from starlette.requests import Request as HttpRequest
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from miles.backends.embedded_engine.answers import meta_info
from miles.backends.embedded_engine.delivery import Outlet
from miles.backends.embedded_engine.generate_api import EngineFacts, GenerateCall, parse_generate
from miles.backends.embedded_engine.http_app import (
    Handler,
    Service,
    abandon,
    error_reply,
    failure_of,
    forget,
    guarded,
    json_body,
    refuse_now,
    reply,
    run_requests,
    wait_finished,
)
from miles.backends.embedded_engine.request import Request
from miles.backends.embedded_engine.sampling_params import RequestError
from miles.backends.embedded_engine.stopping import final_text

# OpenAI's name -> the sampling parameter
_SAMPLING = {
    "temperature": "temperature",
    "top_p": "top_p",
    "n": "n",
    "stop": "stop",
    "seed": "sampling_seed",
    "presence_penalty": "presence_penalty",
    "frequency_penalty": "frequency_penalty",
    "logit_bias": "logit_bias",
    "min_tokens": "min_new_tokens",
} | {
    name: name
    for name in (
        "top_k",
        "min_p",
        "repetition_penalty",
        "stop_token_ids",
        "ignore_eos",
        "skip_special_tokens",
        "no_stop_trim",
        "sampling_seed",
    )
}
# Handed to the /generate parser as they are, which refuses what the engine does not have.
_PASSED_ON = ("rid", "extra_key", "cache_salt", "return_routed_experts", "session_id", "session_params", "lora_path")
_OWN = {
    "model", "messages", "tools", "tool_choice", "stream", "stream_options", "logprobs", "top_logprobs", "max_tokens",
    "max_completion_tokens", "input_ids", "chat_template_kwargs", "continue_final_message", "add_generation_prompt",
    "return_meta_info", "return_token_ids", "return_input_ids_in_sglext", "return_output_ids_in_sglext", "response_format",
}  # fmt: skip
_IGNORED = {
    "user", "metadata", "store", "priority", "routed_dp_rank", "data_parallel_rank", "separate_reasoning", "stream_reasoning",
    "parallel_tool_calls", "service_tier", "reasoning_effort", "sampling_logprobs_mode", "routing_key",
}  # fmt: skip


def openai_routes(service: Service) -> list[Route]:
    handler = guarded(service, chat_completions(service), admin=False)
    return [Route("/v1/chat/completions", handler, methods=["POST"])]


def chat_completions(service: Service) -> Handler:
    async def handler(http: HttpRequest) -> Response:
        body = await json_body(http)
        outlet = Outlet(asyncio.get_running_loop())
        call = parse_chat(body, service.facts, outlet)
        refusal = refuse_now(service)
        if refusal is not None:
            return refusal
        await run_requests(service, call.requests, outlet, stream=call.stream)
        chat = _Chat(service, body, call)
        if call.stream:
            return StreamingResponse(chat.stream(outlet), media_type="text/event-stream")
        try:
            if not await wait_finished(service, http, call.requests, outlet):
                return error_reply("the client closed the connection", 499)
        finally:
            forget(service, call.requests)
        return failure_of(call.requests) or reply(chat.completion())

    return handler


def parse_chat(body: Any, facts: EngineFacts, outlet: Outlet) -> GenerateCall:
    """Raises: RequestError that lists what is wrong with the body."""
    if not isinstance(body, dict):
        raise RequestError("the body must be a JSON object")
    known = _OWN | _IGNORED | set(_SAMPLING) | set(_PASSED_ON)
    unknown = sorted(set(body) - known)
    if unknown:
        raise RequestError(f"unknown fields {', '.join(unknown)}")
    if (body.get("response_format") or {}).get("type", "text") != "text":
        raise RequestError("response_format other than text is not supported by the embedded engine")
    if body.get("tool_choice") not in (None, "auto", "none"):
        raise RequestError("tool_choice other than auto and none is not supported by the embedded engine")
    ids = _prompt_ids(body, facts)
    params = {target: body[name] for name, target in _SAMPLING.items() if body.get(name) is not None}
    limit = body.get("max_completion_tokens") or body.get("max_tokens")
    room = min(facts.config.context_length, facts.capacity) - len(ids)
    params["max_new_tokens"] = limit if limit is not None else max(room, 1)
    generate = {name: body[name] for name in _PASSED_ON if body.get(name) is not None}
    generate |= {
        "input_ids": ids,
        "sampling_params": params,
        "return_logprob": bool(body.get("logprobs")) or bool(body.get("return_meta_info")),
        "top_logprobs_num": body.get("top_logprobs") or 0,
        "stream": bool(body.get("stream")),
    }
    return parse_generate(generate, facts, outlet.emit)


def _prompt_ids(body: dict[str, Any], facts: EngineFacts) -> list[int]:
    """Token ids given by the client as they are, or the messages through the chat template."""
    if facts.tokenizer is None:
        raise RequestError("this model directory has no tokenizer: use /generate with input_ids")
    if body.get("input_ids") is not None:
        return body["input_ids"]
    messages = body.get("messages")
    if not isinstance(messages, list) or not messages or not all(isinstance(m, dict) for m in messages):
        raise RequestError("messages must be a list of objects, at least one")
    continues = bool(body.get("continue_final_message"))
    try:
        ids = facts.tokenizer.apply_chat_template(
            [_plain_content(m) for m in messages],
            tools=body.get("tools") or None if body.get("tool_choice") != "none" else None,
            add_generation_prompt=body.get("add_generation_prompt", not continues),
            continue_final_message=continues,
            tokenize=True,
            return_dict=False,
            **(body.get("chat_template_kwargs") or {}),
        )
    except Exception as error:
        raise RequestError(f"the chat template refused the messages: {error}") from error
    return list(ids)


def _plain_content(message: dict[str, Any]) -> dict[str, Any]:
    """Join the text parts of a message whose content is a list."""
    content = message.get("content")
    if not isinstance(content, list):
        return message
    if not all(isinstance(part, dict) and part.get("type") == "text" for part in content):
        raise RequestError("only text content is supported")
    return message | {"content": "".join(part["text"] for part in content)}


class _Chat:
    """Builds the answers of one call."""

    def __init__(self, service: Service, body: dict[str, Any], call: GenerateCall):
        self.service, self.body, self.call = service, body, call
        self.head = {
            "id": call.requests[0].rid,
            "created": int(time.time()),
            "model": body.get("model") or service.server_args["served_model_name"],
        }

    def completion(self) -> dict[str, Any]:
        requests = self.call.requests
        out = self.head | {
            "object": "chat.completion",
            "choices": [self._choice(i, r) for i, r in enumerate(requests)],
            "usage": self._usage(),
            "metadata": {
                "weight_version": requests[0].weight_version,
                "weight_versions": requests[0].version_spans(),
            },
        }
        extra: dict[str, Any] = {}
        if self.body.get("return_input_ids_in_sglext"):
            extra["input_ids"] = requests[0].input_ids
        if self.body.get("return_output_ids_in_sglext"):
            extra["output_ids"] = [r.output_ids for r in requests] if len(requests) > 1 else requests[0].output_ids
        if self.body.get("return_routed_experts"):
            extra["routed_experts"] = requests[0].encoded_routes()
        return out | ({"sglext": extra} if extra else {})

    def _usage(self) -> dict[str, int]:
        requests = self.call.requests
        prompt = len(requests[0].input_ids)
        completion = sum(len(r.output_ids) for r in requests)
        return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}

    def _choice(self, index: int, request: Request) -> dict[str, Any]:
        facts = self.service.facts
        finish = request.finish_reason or {}
        choice: dict[str, Any] = {
            "index": index,
            "message": {
                "role": "assistant",
                "content": final_text(facts.tokenizer, request.output_ids, request.params, finish),
                "tool_calls": None,
                "reasoning_content": None,
            },
            "logprobs": self._logprobs(request, 0) if self.body.get("logprobs") else None,
            "finish_reason": finish.get("type"),
            "matched_stop": finish.get("matched"),
        }
        if self.body.get("return_meta_info"):
            n = len(request.output_ids)
            choice["meta_info"] = meta_info(request, facts, self.service.weight_version, False, finish, n)
        if self.body.get("return_token_ids"):
            choice["prompt_token_ids"] = request.input_ids
            choice["response_token_ids"] = list(request.output_ids)
        return choice

    def _logprobs(self, request: Request, start: int) -> dict[str, Any]:
        tokenizer = self.service.facts.tokenizer

        def entry(token: int, value: float) -> dict[str, Any]:
            text = tokenizer.decode([token])
            return {"token": text, "bytes": list(text.encode()), "logprob": value}

        content = []
        for i in range(start, len(request.output_ids)):
            tops = request.output_top[i] if i < len(request.output_top) else []
            content.append(
                entry(request.output_ids[i], request.output_logprobs[i])
                | {"top_logprobs": [entry(t, p) for p, t in tops]}
            )
        return {"content": content}

    # ---- streaming -----------------------------------------------------------------------------------------------

    async def stream(self, outlet: Outlet) -> AsyncIterator[bytes]:
        requests = self.call.requests
        index = {r.rid: i for i, r in enumerate(requests)}
        sent, counted = [0] * len(requests), [0] * len(requests)
        try:
            for i in range(len(requests)):
                yield self._event([{"index": i, "delta": {"role": "assistant", "content": ""}, "finish_reason": None}])
            while index:
                request = await outlet.next()
                if request.rid not in index:
                    continue  # its last chunk went out already
                finished, i = request.finished, index[request.rid]
                failure = failure_of([request]) if finished else None
                if failure is not None:
                    yield b"data: " + bytes(failure.body) + b"\n\n"
                    return
                text = self._sendable(request, finished)
                choice: dict[str, Any] = {
                    "index": i,
                    "delta": {"content": text[sent[i] :]},
                    "finish_reason": (request.finish_reason or {}).get("type") if finished else None,
                    "matched_stop": (request.finish_reason or {}).get("matched") if finished else None,
                }
                if finished:
                    del index[request.rid]
                    full = self._choice(i, request)
                    extras = ("meta_info", "prompt_token_ids", "response_token_ids")
                    choice |= {name: full[name] for name in extras if name in full}
                if finished or len(text) > sent[i]:
                    sent[i] = max(sent[i], len(text))
                    if self.body.get("logprobs"):
                        choice["logprobs"] = self._logprobs(request, counted[i])
                        counted[i] += len(choice["logprobs"]["content"])
                    yield self._event([choice])
            if (self.body.get("stream_options") or {}).get("include_usage"):
                yield self._event([], usage=self._usage())
            yield b"data: [DONE]\n\n"
        finally:
            forget(self.service, requests)
            await abandon(self.service, requests)

    def _event(self, choices: list[dict[str, Any]], usage: dict[str, int] | None = None) -> bytes:
        chunk = self.head | {"object": "chat.completion.chunk", "choices": choices, "usage": usage}
        return b"data: " + orjson.dumps(chunk) + b"\n\n"

    def _sendable(self, request: Request, finished: bool) -> str:
        """Text that can go out: no half characters, and nothing that may still become a stop string."""
        text = final_text(
            self.service.facts.tokenizer,
            list(request.output_ids),
            request.params,
            request.finish_reason if finished else None,
        )
        if finished:
            return text
        end = len(text.rstrip("\ufffd"))
        for stop in request.params.stop:
            for n in range(min(len(stop), end), 0, -1):
                if text[:end].endswith(stop[:n]):
                    end -= n
                    break
        return text[:end]
