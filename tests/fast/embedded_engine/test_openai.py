"""`/v1/chat/completions` says what `/generate` says."""

from __future__ import annotations

import json
import urllib.request

import pytest
from transformers import AutoTokenizer

from tests.fast.embedded_engine.test_http import post

MESSAGES = [{"role": "user", "content": "How many apples?"}]


@pytest.fixture(scope="module")
def tokenizer(server):
    return AutoTokenizer.from_pretrained(server.model_path)


def chat(server, **fields):
    status, answer = post(server, "/v1/chat/completions", {"messages": MESSAGES, "seed": 5, "max_tokens": 12} | fields)
    assert status == 200, answer
    return answer


def test_a_completion_is_the_generation_of_the_templates_ids(server, tokenizer):
    answer = chat(server, logprobs=True, top_logprobs=2, return_meta_info=True, return_token_ids=True)
    choice = answer["choices"][0]
    ids = tokenizer.apply_chat_template(MESSAGES, add_generation_prompt=True, return_dict=False)
    same = server.call(
        "generate",
        {"input_ids": ids, "sampling_params": {"max_new_tokens": 12, "sampling_seed": 5}, "return_logprob": True},
    )
    assert choice["prompt_token_ids"] == ids and choice["response_token_ids"] == same["output_ids"]
    assert choice["message"]["content"] == same["text"]
    assert [e["logprob"] for e in choice["logprobs"]["content"]] == [
        e[0] for e in same["meta_info"]["output_token_logprobs"]
    ]
    assert all(len(e["top_logprobs"]) == 2 for e in choice["logprobs"]["content"])
    assert choice["meta_info"]["weight_versions"] == answer["metadata"]["weight_versions"]
    assert answer["usage"] == {
        "prompt_tokens": len(ids),
        "completion_tokens": len(same["output_ids"]),
        "total_tokens": len(ids) + len(same["output_ids"]),
    }


def test_token_ids_of_the_client_replace_the_template(server):
    answer = chat(server, input_ids=[5, 6, 7], return_token_ids=True, n=2)
    assert [c["prompt_token_ids"] for c in answer["choices"]] == [[5, 6, 7]] * 2
    assert answer["choices"][0]["response_token_ids"] != answer["choices"][1]["response_token_ids"]


def test_the_stream_adds_up_to_the_completion(server):
    whole = chat(server, max_tokens=40, logprobs=True)["choices"][0]
    body = {
        "messages": MESSAGES, "seed": 5, "max_tokens": 40, "stream": True, "stream_options": {"include_usage": True}, "logprobs": True,
    }  # fmt: skip
    request = urllib.request.Request(
        f"{server.url}/v1/chat/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=30) as reply:
        lines = [line[6:].strip() for line in reply if line.startswith(b"data: ")]
    assert lines[-1] == b"[DONE]"
    chunks = [json.loads(line) for line in lines[:-1]]
    choices = [c["choices"][0] for c in chunks if c["choices"]]
    assert len(choices) > 3
    assert "".join(c["delta"].get("content", "") for c in choices) == whole["message"]["content"]
    entries = [e for c in choices for e in (c.get("logprobs") or {"content": []})["content"]]
    assert entries == whole["logprobs"]["content"]
    assert choices[-1]["finish_reason"] == whole["finish_reason"]
    assert chunks[-1]["usage"]["completion_tokens"] == len(entries)


def test_tools_reach_the_template(server):
    """The tiny template ignores tools, so what is seen here is that they are accepted and change nothing else."""
    tools = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}]
    assert chat(server, tools=tools)["choices"][0]["message"] == chat(server)["choices"][0]["message"]


@pytest.mark.parametrize(
    "fields, word",
    [
        ({"mesages": []}, "unknown fields mesages"),
        ({"messages": []}, "at least one"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "only text content"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"temperature": -1}, "temperature -1"),
        ({"input_ids": [1, 900]}, "token id 900"),
        ({"session_id": "s"}, "session_id is not supported"),
    ],
)
def test_bad_chats_are_named(server, fields, word):
    status, answer = post(server, "/v1/chat/completions", {"messages": MESSAGES} | fields)
    assert status == 400 and word in answer["error"]["message"]
