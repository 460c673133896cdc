"""The HTTP surface of a real server process."""

from __future__ import annotations

import asyncio
import concurrent.futures
import itertools
import json
import time
import urllib.error
import urllib.request

import pytest

from miles.backends.engine_api.client import EngineClient
from miles.backends.engine_api.errors import EngineRejected
from tests.fast.embedded_engine.conftest import ADMIN_KEY, prompt

SHORT = {"max_new_tokens": 6, "temperature": 1.0, "sampling_seed": 3}


def post(server, path, body, key=None, method="POST"):
    """(status, decoded body) of a plain HTTP call."""
    headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {key}"} if key else {})
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    request = urllib.request.Request(server.url + path, data if method == "POST" else None, headers, method=method)
    try:
        with urllib.request.urlopen(request, timeout=30) as reply:
            status, content = reply.status, reply.read()
    except urllib.error.HTTPError as error:
        status, content = error.code, error.read()
    try:
        return status, json.loads(content) if content else None
    except json.JSONDecodeError:
        return status, content.decode()


def in_background(server, payload, count=1):
    pool = concurrent.futures.ThreadPoolExecutor(count)
    futures = [pool.submit(server.call, "generate", payload(i)) for i in range(count)]
    pool.shutdown(wait=False)
    return futures


def wait_until(condition, seconds=20):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "did not happen in time"
        time.sleep(0.02)


def running(server):
    return server.call("server_info")["internal_states"][0]["num_running_reqs"]


@pytest.fixture(autouse=True)
def leave_it_running(server):
    yield
    server.call("abort", abort_all=True)
    server.call("continue_")


# ---- /generate -------------------------------------------------------------------------------------------------------


def test_meta_info_has_sglangs_fields(server):
    answer = server.call(
        "generate",
        {
            "input_ids": prompt(20), "sampling_params": SHORT, "return_logprob": True, "rid": "abc", "logprob_start_len": 0,
            "top_logprobs_num": 2, "token_ids_logprob": [4, 5], "return_prompt_token_ids": True,
        },
    )  # fmt: skip
    meta = answer["meta_info"]
    assert meta["id"] == "abc" and meta["prompt_tokens"] == 20 and meta["completion_tokens"] == 6
    assert meta["finish_reason"] == {"type": "length", "length": 6}
    assert meta["weight_version"] == "0" and meta["weight_versions"] == [{"version": "0", "start": 0, "end": 6}]
    assert [t for _, t, _ in meta["output_token_logprobs"]] == answer["output_ids"]
    assert [t for _, t, _ in meta["input_token_logprobs"]] == answer["prompt_token_ids"] == prompt(20)
    assert meta["input_token_logprobs"][0][0] is None and meta["input_top_logprobs"][0] is None
    assert [len(x) for x in meta["output_top_logprobs"]] == [2] * 6
    assert [[t for _, t, _ in x] for x in meta["output_token_ids_logprobs"]] == [[4, 5]] * 6
    assert isinstance(answer["text"], str)


def test_batches_and_n_answer_in_request_order(server):
    one = [server.call("generate", {"input_ids": prompt(9, seed=i), "sampling_params": SHORT}) for i in range(2)]
    batch = server.call(
        "generate",
        {
            "input_ids": [prompt(9, seed=0), prompt(9, seed=1)], "rid": ["a", "b"],
            "sampling_params": [SHORT | {"n": 2}, SHORT],
        },
    )  # fmt: skip
    assert [a["meta_info"]["id"] for a in batch] == ["a_0", "a_1", "b"]
    assert batch[0]["output_ids"] == one[0]["output_ids"] and batch[2]["output_ids"] == one[1]["output_ids"]
    assert batch[1]["output_ids"] != batch[0]["output_ids"], "samples of one prompt must differ"


def test_text_in_and_stop_tokens_out(server):
    free = server.call(
        "generate", {"text": "Hello", "sampling_params": SHORT | {"max_new_tokens": 30, "ignore_eos": True}}
    )
    stop = free["output_ids"][4]
    asked = SHORT | {"max_new_tokens": 30, "stop_token_ids": [stop]}
    trimmed = server.call("generate", {"text": "Hello", "sampling_params": asked})
    kept = server.call("generate", {"text": "Hello", "sampling_params": asked | {"no_stop_trim": True}})
    assert trimmed["output_ids"][-1] == stop == trimmed["meta_info"]["finish_reason"]["matched"]
    assert kept["text"].startswith(trimmed["text"]) and kept["output_ids"] == trimmed["output_ids"]


def test_a_stream_grows_to_the_same_answer(server):
    payload = {"input_ids": prompt(12), "sampling_params": SHORT | {"max_new_tokens": 600}, "return_logprob": True}

    async def collect():
        async with EngineClient(server.url) as client:
            return [chunk async for chunk in client.generate_stream(payload)]

    chunks = asyncio.run(collect())
    whole = server.call("generate", payload)
    assert (
        len(chunks) > 1 and chunks[-1]["meta_info"]["finish_reason"] and chunks[0]["meta_info"]["finish_reason"] is None
    )
    for before, after in itertools.pairwise(chunks):
        assert after["output_ids"][: len(before["output_ids"])] == before["output_ids"]
    assert all(len(c["meta_info"]["output_token_logprobs"]) == len(c["output_ids"]) for c in chunks)
    assert chunks[-1]["output_ids"] == whole["output_ids"] and chunks[-1]["text"] == whole["text"]


@pytest.mark.parametrize(
    "body, words",
    [
        ({"input_ids": [1, 999]}, ["token id 999 at position 1 is outside the vocabulary of 320"]),
        ({"input_ids": [1, -1]}, ["token id -1"]),
        ({"input_ids": []}, ["prompt is empty"]),
        ({"input_ids": [1.5]}, ["must be integers"]),
        ({}, ["exactly one of input_ids and text"]),
        ({"input_ids": [1], "text": "a"}, ["exactly one of"]),
        (
            {"input_ids": [1], "sampling_params": {"temp": 1, "top_p": 3}, "colour": 1},
            ["unknown field 'colour'", "unknown sampling parameter 'temp'"],
        ),
        ({"input_ids": [5] * 2048, "sampling_params": SHORT}, ["2048 tokens", "context 2048"]),
        ({"input_ids": [5] * 2040, "sampling_params": {"max_new_tokens": 9}}, ["exceed the context of 2048"]),
        ({"input_ids": [[1], [2, 400]]}, ["prompt 1: token id 400"]),
        ({"input_ids": [1], "lora_path": "x"}, ["lora_path is not supported"]),
        ({"input_ids": [1], "return_routed_experts": True}, ["no experts"]),
        ({"input_ids": [[1], [2]], "rid": ["a", "a"]}, ["duplicates"]),
        ({"input_ids": [1], "logprob_start_len": 3}, ["logprob_start_len 3"]),
        (b"{", ["not valid JSON"]),
        ([1], ["must be a JSON object"]),
    ],
)
def test_bad_requests_are_named(server, body, words):
    status, answer = post(server, "/generate", body)
    assert status == 400
    for word in words:
        assert word in answer["error"]["message"]


def test_a_request_id_in_use_is_refused(server):
    (first,) = in_background(
        server,
        lambda i: {"input_ids": prompt(9), "rid": "x", "sampling_params": {"max_new_tokens": 1500, "ignore_eos": True}},
    )
    wait_until(lambda: running(server) == 1)
    status, answer = post(server, "/generate", {"input_ids": [1], "rid": "x"})
    assert status == 400 and "rid x is in use" in answer["error"]["message"]
    server.call("abort", "x")
    assert first.result(20)["meta_info"]["finish_reason"]["type"] == "abort"


# ---- abort, pause, flush ---------------------------------------------------------------------------------------------

LONG = {"max_new_tokens": 1800, "temperature": 1.0, "sampling_seed": 1, "ignore_eos": True}


def test_abort_takes_one_request_and_not_its_namesakes(server):
    futures = in_background(
        server, lambda i: {"input_ids": prompt(9), "rid": ["r1", "r10"][i], "sampling_params": LONG}, 2
    )
    wait_until(lambda: running(server) == 2)
    server.call("abort", "r1")
    aborted = futures[0].result(20)
    assert aborted["meta_info"]["finish_reason"]["type"] == "abort"
    assert len(aborted["output_ids"]) == aborted["meta_info"]["completion_tokens"] > 0
    assert not futures[1].done() and running(server) == 1
    server.call("abort", abort_all=True)
    assert futures[1].result(20)["meta_info"]["finish_reason"]["type"] == "abort"


def test_a_client_that_leaves_frees_its_place(server):
    async def leave():
        async with EngineClient(server.url) as client:
            task = asyncio.create_task(client.generate({"input_ids": prompt(9), "sampling_params": LONG}))
            await asyncio.sleep(0.3)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    asyncio.run(leave())
    wait_until(lambda: running(server) == 0)


@pytest.mark.parametrize("mode", ["retract", "in_place"])
def test_a_pause_holds_and_continues_with_the_same_tokens(server, mode):
    payload = {"input_ids": prompt(30), "sampling_params": LONG | {"max_new_tokens": 400}, "return_logprob": True}
    expected = server.call("generate", payload)
    (future,) = in_background(server, lambda i: payload)
    wait_until(lambda: running(server) == 1)
    server.call("pause", mode)
    (late,) = in_background(server, lambda i: {"input_ids": [1, 2], "sampling_params": SHORT})
    server.call("health")
    assert server.call("server_info")["paused"] == mode
    time.sleep(0.3)
    assert not late.done() and not future.done()
    if mode == "retract":
        server.call("flush")
    else:
        with pytest.raises(EngineRejected, match="frozen with their cache"):
            server.call("post", "/flush_cache")
    server.call("continue_")
    answer = future.result(20)
    assert answer["output_ids"] == expected["output_ids"]
    assert answer["meta_info"]["output_token_logprobs"] == expected["meta_info"]["output_token_logprobs"]
    assert answer["meta_info"]["num_retractions"] == (1 if mode == "retract" else 0)
    late.result(20)


def test_an_abort_pause_ends_what_runs_and_holds_what_comes(server):
    (future,) = in_background(server, lambda i: {"input_ids": prompt(9), "sampling_params": LONG})
    wait_until(lambda: running(server) == 1)
    server.call("pause", "abort")
    assert future.result(20)["meta_info"]["finish_reason"]["type"] == "abort"
    (late,) = in_background(server, lambda i: {"input_ids": [1, 2], "rid": "held", "sampling_params": SHORT})
    time.sleep(0.2)
    server.call("abort", "held")
    assert late.result(20)["output_ids"] == []


def test_flush_is_refused_while_busy(server):
    in_background(server, lambda i: {"input_ids": prompt(9), "sampling_params": LONG})
    wait_until(lambda: running(server) == 1)
    status, text = post(server, "/flush_cache", b"", ADMIN_KEY)
    assert status == 400 and "in use by 1 request" in text
    server.call("abort", abort_all=True)
    assert post(server, "/flush_cache?timeout=5", b"", ADMIN_KEY)[0] == 200


# ---- keys and state --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "path", ["/pause_generation", "/update_weight_version", "/weights_checker", "/flush_cache", "/abort_request"]
)
@pytest.mark.parametrize("key", [None, "another-runs-key"])
def test_control_calls_need_this_runs_key(server, path, key):
    assert post(server, path, {}, key)[0] == 401
    assert server.call("server_info")["paused"] is None


def test_state_endpoints(server):
    assert post(server, "/health", b"", method="GET")[0] == 200
    assert post(server, "/health_generate", b"", method="GET")[0] == 200
    assert server.call("model_info")["weight_version"] == "0"
    info = server.call("server_info")
    assert info["max_total_num_tokens"] > 0 and "admin_api_key" not in json.dumps(info)
    status, models = post(server, "/v1/models", b"", method="GET")
    assert status == 200 and models["data"][0]["max_model_len"] == 2048
    status, text = post(server, "/metrics", b"", method="GET")
    assert status == 200 and "sglang:generation_tokens_total" in text
    assert post(server, "/no_such_call", {})[0] == 404
