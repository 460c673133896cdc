"""What a server refuses, from agents and from engines: with the right status, the reason, and nothing changed."""

from __future__ import annotations

import asyncio

import pytest

from miles.rollout.session.errors import EngineUnavailable
from tests.fast.session.conftest import user


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("input_ids", [1, 2]),
        ("prompt_token_ids", [1]),
        ("logprob_start_len", 0),
        ("routed_experts_start_len", 3),
        ("session_params", {"id": "x"}),
        ("continue_final_message", True),
    ],
)
async def test_tokens_and_offsets_are_the_servers(serve, field, value):
    server = serve()
    chat = await server.open()
    refused = await chat.post([user("hi")], **{field: value})
    assert refused.status_code == 400
    assert field in refused.json()["error"]["message"] and "owns the tokens" in refused.json()["error"]["message"]
    assert server.engine.prompts == []


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({"n": 2}, "n=2"),
        ({"n": 0}, "n=0"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"chat_template_kwargs": [1]}, "chat_template_kwargs"),
        ({"chat_template_kwargs": {"clear_thinking": True}}, "clear_thinking"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"lora_path": "x"}, "lora_path"),
        ({"no_such_field": 1}, "no_such_field"),
        ({"messages": []}, "at least one message"),
        ({"messages": [{"role": "robot", "content": "x"}]}, "unknown role 'robot'"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]}, "image_url"),
        ({"messages": [{"role": "user", "content": 7}]}, "must be text"),
        ({"messages": ["hi"]}, "must be an object"),
        ({"messages": [{"role": "assistant", "tool_calls": [{"id": "x"}]}]}, "tool_calls"),
        ({"tools": [{"name": "x"}]}, "tools"),
    ],
)
async def test_a_request_that_asks_for_too_much(serve, body, words):
    server = serve()
    chat = await server.open()
    answer = await server.http.post(f"{chat.path}/v1/chat/completions", json={"messages": [user("hi")]} | body)
    assert answer.status_code == 400 and words in answer.json()["error"]["message"]
    assert server.engine.prompts == [] and chat.session.history.nodes == []


async def test_all_problems_at_once(serve):
    chat = await serve().open()
    error = (await chat.post([{"role": "robot"}], n=3, input_ids=[1])).json()["error"]["message"]
    assert all(part in error for part in ("robot", "n=3", "input_ids"))


async def test_bodies_that_are_no_json(serve):
    server = serve(max_body_bytes=1000)
    chat = await server.open()
    url = f"{chat.path}/v1/chat/completions"
    for content in (
        b"{",
        b"\xff\xfe{}",
        b'{"messages": [{"role": "user", "content": "\xff"}]}',
        b"[1]",
        b"null",
        b'{"a": NaN}',
    ):
        answer = await server.http.post(url, content=content)
        assert answer.status_code == 400, content
    too_big = await server.http.post(url, content=b" " * 2000)
    assert too_big.status_code == 413 and "2000 bytes" in too_big.json()["error"]["message"]

    async def endless():
        for _ in range(100):
            yield b" " * 100

    assert (await server.http.post(url, content=endless())).status_code == 413
    assert (await server.http.post(f"{chat.path}/samples", content=b"{")).status_code == 400


async def test_a_session_needs_its_key_on_every_call(serve):
    server = serve()
    chat, other = await server.open(), await server.open()
    calls = [
        ("GET", ""),
        ("DELETE", ""),
        ("POST", "/samples"),
        ("POST", "/v1/chat/completions"),
        ("POST", "/v1/messages"),
        ("GET", "/v1/models"),
    ]
    for method, path in calls:
        for session, headers in (
            (chat.id, {}),
            (f"{chat.id}.{other.key}", {}),
            (chat.id, {"authorization": f"Bearer {other.key}"}),
            (chat.id, {"authorization": f"Bearer {server.service.config.key}"}),
        ):
            answer = await server.http.request(method, f"/sessions/{session}{path}", headers=headers)
            assert answer.status_code == 401, (method, path)
        unknown = await server.http.request(method, f"/sessions/{'0' * 32}.{chat.key}{path}")
        assert unknown.status_code == 404 and "0" * 32 in unknown.text
    for headers in ({"authorization": f"Bearer {chat.key}"}, {"x-api-key": chat.key}):
        assert (await server.http.get(f"/sessions/{chat.id}", headers=headers)).status_code == 200
    assert (await server.http.post("/sessions")).status_code == 401
    assert (await server.http.put("/engines", json={})).status_code == 401


@pytest.mark.parametrize(
    "path", ["/generate", "/v1/completions", "/flush_cache", "/abort_request", "/update_weights_from_disk"]
)
async def test_nothing_else_reaches_an_engine(serve, path):
    server = serve()
    chat = await server.open()
    for target in (path, chat.path + path):
        assert (await server.http.post(target, json={})).status_code == 404
    assert server.engine.prompts == []


async def test_delete_and_after(serve):
    server = serve()
    chat = await server.open()
    answers = await asyncio.gather(server.http.delete(chat.path), server.http.delete(chat.path))
    assert sorted(a.status_code for a in answers) == [204, 404]
    assert (await chat.post([user("hi")])).status_code == 404
    assert server.service.store.bytes == 0


async def test_deleting_stops_what_runs(serve):
    server = serve()
    chat = await server.open()
    server.engine.gate.clear()
    running = asyncio.create_task(chat.post([user("hi")]))
    while not server.engine.prompts:
        await asyncio.sleep(0.01)
    assert (await server.http.delete(chat.path)).status_code == 204
    assert (await asyncio.wait_for(running, 5)).status_code >= 400
    assert server.engine.cancelled == 1


async def test_limits_and_expiry(serve):
    server = serve(max_sessions=2, idle_timeout_s=0.2)
    first = await server.open()
    await server.open()
    key = {"authorization": f"Bearer {server.service.config.key}"}
    full = await server.http.post("/sessions", headers=key)
    assert full.status_code == 429 and "--session-max-count" in full.json()["error"]["message"]
    await asyncio.sleep(0.3)
    assert (await server.http.post("/sessions", headers=key)).status_code == 200  # the idle ones are gone
    assert (await server.http.get(first.path)).status_code == 404
    small = serve(max_bytes=10)
    chat = await small.open()
    await chat.say([user("hi")])
    refused = await chat.post([user("hi"), chat.session.history.head.said, user("x")])
    assert refused.status_code == 413 and "--session-max-bytes" in refused.json()["error"]["message"]


async def test_a_conversation_that_is_too_long(serve):
    server = serve(context_length=40)
    chat = await server.open()
    refused = await chat.post([user("long " * 30)])
    assert refused.status_code == 400 and "context_length_exceeded" in refused.json()["error"]["message"]
    await chat.post([user("x")], max_tokens=1000)
    assert server.engine.payloads[0]["sampling_params"]["max_new_tokens"] == 40 - len(server.engine.prompts[0])
    bounded = await serve().open(max_seq_len=30)
    assert (await bounded.post([user("long " * 30)])).status_code == 400


def _without(name):
    return lambda a: a | {"meta_info": {k: v for k, v in a["meta_info"].items() if k != name}}


def _with(**meta):
    return lambda a: a | {"meta_info": a["meta_info"] | meta}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (_without("output_token_logprobs"), "no log-probs"),
        (lambda a: {"text": "hi"}, "no meta_info"),
        (_with(completion_tokens=3), "log-probs for 3 tokens"),
        (_with(prompt_tokens=1), "a prompt of 1 tokens"),
        (_with(output_token_logprobs=[[None, 5, None]]), "no numbers"),
        (_with(output_token_logprobs=[[float("nan"), 5, None]]), "no numbers"),
        (_with(output_token_logprobs=[[-1.0, -5, None]]), "no token ids"),
        (_with(output_token_logprobs=[7]), "malformed"),
        (_with(finish_reason=None), "finish_reason None"),
        (lambda a: a | {"output_ids": [*a["output_ids"][:-1], 1]}, "not those of its log-probs"),
        (lambda a: a | {"prompt_token_ids": [1, 2]}, "another prompt"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
async def test_an_engine_that_breaks_the_contract(serve, change, words, stream):
    server = serve()
    chat = await server.open()
    server.engine.change = change
    answer = await chat.post([user("hi")], stream=stream)
    assert words in answer.text and (stream or answer.status_code == 502)
    assert answer.headers.get("x-should-retry") == "false" or stream
    assert chat.session.history.nodes == []
    server.engine.change = lambda a: a
    await chat.say([user("hi")])


async def test_an_aborted_generation_is_not_kept(serve):
    server = serve()
    chat = await server.open()
    server.engine.change = _with(finish_reason={"type": "abort"})
    answer = await chat.post([user("hi")])
    assert answer.status_code == 503 and answer.headers["x-should-retry"] == "false"
    assert chat.session.history.nodes == []


async def test_an_engine_that_dies_in_mid_stream(serve):
    server = serve()
    chat = await server.open()
    server.engine.die_after = 4
    answer = await chat.post([user("hi")], stream=True)
    assert answer.status_code == 200
    assert '"error"' in answer.text and "[DONE]" not in answer.text
    assert chat.session.history.nodes == []
    server.engine.die_after = 0
    first = await chat.post([user("hi")], stream=True)
    assert (
        first.status_code == 502 and "died" in first.json()["error"]["message"]
    )  # nothing had been sent: a plain error


async def test_health_is_stable(serve):
    server = serve()
    one, two = [(await server.http.get("/health")).json() for _ in range(2)]
    assert one == two and one["status"] == "ok" and len(one["session_server_instance_id"]) == 32


async def test_an_engine_error_keeps_its_reason(serve):
    server = serve()
    chat = await server.open()
    server.engine.fail = EngineUnavailable("no engine could answer: gone")
    answer = await chat.post([user("hi")])
    assert answer.status_code == 502 and "gone" in answer.json()["error"]["message"]
