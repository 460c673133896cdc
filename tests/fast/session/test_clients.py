"""The official OpenAI and Anthropic clients, whole and streaming: the same conversation has the same tokens."""

from __future__ import annotations

import json

import anthropic
import httpx
import httpx2
import openai
import pytest
from openai.lib.streaming.chat import ChatCompletionStreamState

from tests.fast.session.conftest import TOOLS, Chat, Server, check_sample

CALL = '<think>\nLook it up.\n</think>\n\nOne moment.\n<tool_call>\n{"name": "get", "arguments": {"b": 1, "a": "é"}}\n</tool_call>'
ANSWER = "<think>\nI see.\n</think>\n\nIt is 4."


def say(text: str) -> str:
    return ANSWER if "<tool_response>" in text else CALL


def openai_client(server: Server, chat: Chat) -> openai.AsyncOpenAI:
    transport = httpx.ASGITransport(app=server.http._transport.app)
    return openai.AsyncOpenAI(
        base_url=f"http://session{chat.path}/v1", api_key="EMPTY", http_client=httpx.AsyncClient(transport=transport)
    )


def anthropic_client(server: Server, chat: Chat) -> anthropic.AsyncAnthropic:
    transport = httpx2.ASGITransport(app=server.http._transport.app)
    return anthropic.AsyncAnthropic(
        base_url=f"http://session/sessions/{chat.id}",
        api_key=chat.key,
        http_client=httpx2.AsyncClient(transport=transport),
    )


async def openai_turn(client: openai.AsyncOpenAI, stream: bool, messages: list, tools: list | None) -> tuple[dict, str]:
    fields = {"model": "m", "messages": messages, "max_tokens": 300, "temperature": 0.7}
    if tools:
        fields["tools"] = tools
    if not stream:
        choice = (await client.chat.completions.create(**fields)).choices[0]
        return choice.message.model_dump(), choice.finish_reason
    state = ChatCompletionStreamState()
    chunks = 0
    async for chunk in await client.chat.completions.create(
        **fields, stream=True, stream_options={"include_usage": True}
    ):
        state.handle_chunk(chunk)
        chunks += 1
    done = state.get_final_completion()
    assert chunks > 5 and done.usage.completion_tokens > 0
    return done.choices[0].message.model_dump(), done.choices[0].finish_reason


async def openai_talk(server: Server, stream: bool) -> Chat:
    chat = await server.open()
    client = openai_client(server, chat)
    messages: list = [{"role": "system", "content": "Help."}, {"role": "user", "content": "q"}]
    said, finish = await openai_turn(client, stream, messages, TOOLS)
    assert finish == "tool_calls" and said["content"] == "One moment."
    [call] = said["tool_calls"]
    assert json.loads(call["function"]["arguments"]) == {"b": 1, "a": "é"}
    messages += [said, {"role": "tool", "tool_call_id": call["id"], "content": "4"}]
    said, finish = await openai_turn(client, stream, messages, TOOLS)
    assert (finish, said["content"]) == ("stop", "It is 4.")
    await client.close()
    return chat


async def anthropic_talk(server: Server, stream: bool) -> Chat:
    chat = await server.open()
    client = anthropic_client(server, chat)
    tools = [{"name": "get", "input_schema": TOOLS[0]["function"]["parameters"]}]
    messages: list = [{"role": "user", "content": "q"}]

    async def turn():
        fields = {
            "model": "m",
            "max_tokens": 300,
            "extra_body": {"temperature": 0.7},
            "system": "Help.",
            "messages": messages,
            "tools": tools,
        }
        if not stream:
            return await client.messages.create(**fields)
        seen = []
        async with client.messages.stream(**fields) as events:
            async for event in events:
                seen.append(event.type)
            message = await events.get_final_message()
        assert seen[0] == "message_start" and seen[-1] == "message_stop" and seen.count("content_block_delta") > 2
        return message

    said = await turn()
    assert said.stop_reason == "tool_use"
    assert [block.type for block in said.content] == ["thinking", "text", "tool_use"]
    assert said.content[0].thinking == "Look it up." and said.content[1].text == "One moment."
    assert said.content[2].input == {"b": 1, "a": "é"}
    messages.append({"role": "assistant", "content": [block.model_dump() for block in said.content]})
    result = {"type": "tool_result", "tool_use_id": said.content[2].id, "content": [{"type": "text", "text": "4"}]}
    messages.append({"role": "user", "content": [result]})
    said = await turn()
    assert said.stop_reason == "end_turn" and said.content[-1].text == "It is 4."
    assert said.usage.output_tokens > 0
    await client.close()
    return chat


async def test_every_client_gets_the_same_tokens(serve):
    rows = []
    for talk in (openai_talk, anthropic_talk):
        for stream in (False, True):
            server = serve(say=say)
            chat = await talk(server, stream)
            assert len(chat.session.history.nodes) == 2 and chat.session.history.counts.rollbacks == 0
            [sample] = (await chat.samples()).samples
            check_sample(sample)
            assert sample.metadata["tito_session_mismatch"] == []
            rows.append((sample.tokens, sample.loss_mask, sample.rollout_log_probs))
            assert [p["sampling_params"]["temperature"] for p in server.engine.payloads] == [0.7, 0.7]
    assert all(row == rows[0] for row in rows)


async def test_a_stream_tells_nothing_that_is_not_in_the_whole_answer(serve):
    server = serve(say=say)
    chat = await server.open()
    body = {
        "messages": [{"role": "user", "content": "q"}],
        "tools": TOOLS,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    answer = await server.http.post(f"{chat.path}/v1/chat/completions", json=body)
    assert answer.headers["content-type"].startswith("text/event-stream")
    lines = [line.removeprefix("data: ") for line in answer.text.split("\n\n") if line]
    assert lines[-1] == "[DONE]"
    chunks = [json.loads(line) for line in lines[:-1]]
    deltas = [c["choices"][0]["delta"] for c in chunks if c["choices"]]
    assert "".join(d.get("content") or "" for d in deltas) == "One moment."
    assert "".join(d.get("reasoning_content") or "" for d in deltas) == "Look it up."
    assert sum("reasoning_content" in d for d in deltas) > 3  # it came in parts
    calls = [d["tool_calls"][0] for d in deltas if "tool_calls" in d]
    assert all(call["index"] == 0 for call in calls)
    assert chunks[-1]["choices"] == [] and chunks[-1]["usage"]["completion_tokens"] > 0
    assert {c["id"] for c in chunks} == {chat.session.history.head.turn.response_id}


async def test_errors_as_each_client_knows_them(serve):
    server = serve()
    chat = await server.open()
    client = openai_client(server, chat)
    with pytest.raises(openai.BadRequestError, match="owns the tokens"):
        await client.chat.completions.create(
            model="m", messages=[{"role": "user", "content": "x"}], extra_body={"input_ids": [1]}
        )
    other = anthropic_client(server, chat)
    with pytest.raises(anthropic.BadRequestError, match="owns the tokens"):
        await other.messages.create(
            model="m", max_tokens=5, messages=[{"role": "user", "content": "x"}], extra_body={"input_ids": [1]}
        )
    for content in (
        [{"type": "image", "source": {"type": "url", "url": "x"}}],
        [{"type": "tool_result", "tool_use_id": "x", "content": [{"type": "image"}]}],
    ):
        with pytest.raises(anthropic.BadRequestError, match=r"image|only text"):
            await other.messages.create(model="m", max_tokens=5, messages=[{"role": "user", "content": content}])
    with pytest.raises(anthropic.BadRequestError, match="run on the server"):
        await other.messages.create(
            model="m",
            max_tokens=5,
            messages=[{"role": "user", "content": "x"}],
            tools=[{"type": "web_search_20250305", "name": "web_search"}],
        )
    wrong = anthropic.AsyncAnthropic(
        base_url=f"http://session/sessions/{chat.id}",
        api_key="no",
        http_client=httpx2.AsyncClient(transport=httpx2.ASGITransport(app=server.http._transport.app)),
    )
    with pytest.raises(anthropic.AuthenticationError):
        await wrong.messages.create(model="m", max_tokens=5, messages=[{"role": "user", "content": "x"}])
    assert chat.session.history.nodes == []


async def test_arguments_that_are_no_json_reach_the_model_as_an_error(serve):
    """OpenAI agents see the text; Anthropic's input must be an object, and its replay is still the stored message."""
    bad = '<tool_call>\n{"name": "get", "arguments": {"a": }\n</tool_call>'
    server = serve(say=lambda text: "sorry" if "<tool_response>" in text else bad)
    chat = await server.open()
    client = anthropic_client(server, chat)
    tools = [{"name": "get", "input_schema": TOOLS[0]["function"]["parameters"]}]
    messages: list = [{"role": "user", "content": "q"}]
    said = await client.messages.create(model="m", max_tokens=300, messages=messages, tools=tools)
    [call] = said.content
    assert call.input["_raw_arguments"].startswith('{"a": }')
    messages += [
        {"role": "assistant", "content": [call.model_dump()]},
        {
            "role": "user",
            "content": [{"type": "tool_result", "tool_use_id": call.id, "content": "not JSON", "is_error": True}],
        },
    ]
    said = await client.messages.create(model="m", max_tokens=300, messages=messages, tools=tools)
    assert said.content[0].text == "sorry"
    assert len(chat.session.history.nodes) == 2 and chat.session.history.counts.rollbacks == 0
