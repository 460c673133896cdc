"""What the client sends, and what it makes of every kind of answer."""

from __future__ import annotations

import asyncio
import pickle
import socket
import time

import pytest
from starlette.responses import StreamingResponse

from miles.backends.engine_api.client import (
    EngineClient,
    EngineFailed,
    EngineRejected,
    EngineTimeout,
    EngineUnreachable,
)
from tests.fast.engine_api.http_server import Script, serve


@pytest.fixture(scope="module")
def server():
    script = Script()
    with serve(script) as url:
        yield script, url


@pytest.fixture
async def engine(server):
    """A scripted server and a client of it."""
    script, url = server
    script.answers.clear()
    script.requests.clear()
    script.cancelled.clear()
    async with EngineClient(url, admin_key="secret", control_timeout_s=5, retries=2, vocab_size=100) as client:
        yield script, client


async def test_control_calls_carry_the_key_and_generation_does_not(engine):
    script, client = engine
    script.answers["/generate"] = [(200, {"text": "x"})]
    await client.generate({"input_ids": [1]})
    await client.pause("retract")
    keys = {path: headers.get("authorization") for path, headers, _ in script.requests}
    assert keys == {"/generate": None, "/pause_generation": "Bearer secret"}


async def test_requests_have_the_shapes_that_sglang_documents(engine):
    script, client = engine
    await client.abort("r1")
    await client.abort(abort_all=True)
    await client.update_weight_version(3)
    await client.init_weights_update_group("10.0.0.1", 5, 1, 3, "g", "gloo")
    await client.update_weights_from_distributed(["a"], ["bfloat16"], [(2, 3)], "g")
    await client.update_weights_from_disk("/m", weight_version=4)
    await client.release_memory(["weights"])
    await client.resume_memory()
    await client.weights_checker("reset_tensors", skip_tensor_list=None, selector="all")
    assert script.seen("/abort_request") == [{"rid": "r1", "abort_all": False}, {"rid": "", "abort_all": True}]
    assert script.seen("/update_weight_version") == [{"new_version": "3", "abort_all_requests": False}]
    assert script.seen("/init_weights_update_group") == [
        {
            "master_address": "10.0.0.1",
            "master_port": 5,
            "rank_offset": 1,
            "world_size": 3,
            "group_name": "g",
            "backend": "gloo",
        }
    ]
    bucket = {"names": ["a"], "dtypes": ["bfloat16"], "shapes": [[2, 3]], "group_name": "g"}
    # flush_cache=true with requests pending kills some server versions.
    assert script.seen("/update_weights_from_distributed") == [
        bucket | {"load_format": "flattened_bucket", "flush_cache": False}
    ]
    assert script.seen("/update_weights_from_disk")[0]["weight_version"] == "4"
    assert script.seen("/release_memory_occupation") == [{"tags": ["weights"]}]
    assert script.seen("/resume_memory_occupation") == [{}]
    assert script.seen("/weights_checker") == [{"action": "reset_tensors", "selector": "all"}]
    with pytest.raises(ValueError, match="request id, or abort_all"):
        await client.abort()


@pytest.mark.parametrize(
    ("status", "body", "error", "words"),
    [
        (400, {"error": {"message": "input too long"}}, EngineRejected, "refused the call with 400: input too long"),
        (400, {"success": False, "message": "not paused"}, EngineRejected, "400: not paused"),
        (200, {"success": False, "message": "shape differs"}, EngineRejected, "reported no success: shape differs"),
        (422, {"detail": [{"loc": "x"}]}, EngineRejected, "422"),
        (401, {"error": "Unauthorized"}, EngineRejected, "belongs to another run"),
        (500, b"boom", EngineFailed, "failed with 500: boom"),
        (503, b"", EngineFailed, r"503: \(empty answer\)"),
    ],
)
async def test_answers_become_typed_errors_in_the_servers_own_words(engine, status, body, error, words):
    script, client = engine
    script.answers["/begin_weight_update"] = [(status, body)]
    with pytest.raises(error, match=words) as raised:
        await client.begin_weight_update()
    assert raised.value.status == status and f"{client.base_url}/begin_weight_update" in str(raised.value)
    assert pickle.loads(pickle.dumps(raised.value)).status == status  # it crosses Ray
    assert len(script.requests) == 1  # not idempotent, so not tried again


async def test_update_sessions_are_optional(engine):
    script, client = engine
    script.answers = {"/begin_weight_update": [(404, b"")], "/end_weight_update": [(404, b"")]}
    assert (await client.begin_weight_update(), await client.end_weight_update()) == (False, False)


async def test_idempotent_calls_are_tried_again_but_not_for_ever(engine):
    script, client = engine
    script.answers["/continue_generation"] = [(500, b""), (500, b""), (200, {"status": "ok"})]
    await client.continue_()
    script.answers["/continue_generation"] = [(500, b"")]
    with pytest.raises(EngineFailed):
        await client.continue_()
    assert len(script.requests) == 3 + 3


async def test_a_hung_server_meets_the_deadline_which_covers_all_attempts(engine):
    script, client = engine
    script.answers["/model_info"] = [(500, b""), script.hang]
    started = time.monotonic()
    with pytest.raises(EngineTimeout, match=r"/model_info did not answer within 0.4 s"):
        await client.model_info(timeout_s=0.4)
    assert time.monotonic() - started < 2


async def test_health_is_200_and_nothing_else(engine):
    script, client = engine
    script.answers["/health"] = [(503, b"loading"), (200, b"")]
    with pytest.raises(EngineFailed, match="503: loading"):
        await client.health()
    await client.health()


async def test_liveness_is_not_asked_of_health_which_a_paused_server_leaves_unanswered(engine):
    script, client = engine
    script.answers = {"/health": [script.hang], "/model_info": [(200, {})]}
    await client.alive(timeout_s=2)
    script.answers["/model_info"] = [(500, b"")]
    with pytest.raises(EngineFailed):
        await client.alive()


async def test_no_server_is_unreachable():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    async with EngineClient(f"http://127.0.0.1:{port}", retries=0) as client:
        with pytest.raises(EngineUnreachable, match=f"127.0.0.1:{port}/generate: connection lost"):
            await client.generate({"input_ids": [1]})


async def test_a_connection_that_closes_without_an_answer_is_unreachable():
    async def hang_up(reader, writer):
        await reader.readline()
        writer.close()

    listener = await asyncio.start_server(hang_up, "127.0.0.1", 0)
    url = f"http://127.0.0.1:{listener.sockets[0].getsockname()[1]}"
    async with listener, EngineClient(url) as client:
        with pytest.raises(EngineUnreachable):
            await client.generate({"input_ids": [1]})


async def test_flush_waits_while_requests_are_pending(engine):
    script, client = engine
    script.answers["/flush_cache"] = [(400, b"busy"), (400, b"busy"), (200, b"Cache flushed.")]
    await client.flush()
    assert len(script.requests) == 3
    script.answers["/flush_cache"] = [(400, b"busy")]
    with pytest.raises(EngineTimeout, match=r"refused for 0.2 s because requests are pending: .*busy"):
        await client.flush(timeout_s=0.2)


async def test_checksums_are_those_of_the_first_rank(engine):
    script, client = engine
    script.answers["/weights_checker"] = [(200, {"success": True, "ranks": [{"checksums": {"a": "ff"}}]})]
    assert await client.weights_checksums() == {"a": "ff"}
    script.answers["/weights_checker"] = [(200, {"success": True})]
    with pytest.raises(EngineFailed, match="gave no checksums"):
        await client.weights_checksums()


@pytest.mark.parametrize("prompt", [[1, 100], [1, -1], [[1], [5, 100]]])
async def test_ids_outside_the_vocabulary_never_reach_the_engine(engine, prompt):
    script, client = engine
    with pytest.raises(ValueError, match=r"prompt token 1 is (100|-1); the model's vocabulary has 100 ids"):
        await client.generate({"input_ids": prompt})
    assert script.requests == []


async def test_an_answer_that_is_no_generation_is_refused(engine):
    script, client = engine
    script.answers["/generate"] = [(200, b"")]
    with pytest.raises(EngineFailed, match="no generation"):
        await client.generate({"input_ids": [1]})


async def test_cancelling_a_generation_tells_the_server(engine):
    script, client = engine
    script.answers["/generate"] = [script.hang]
    task = asyncio.create_task(client.generate({"input_ids": [1]}))
    while not script.requests:
        await asyncio.sleep(0.01)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert await asyncio.to_thread(script.cancelled.wait, 5)


async def test_streams_give_each_chunk_and_say_how_they_broke(engine):
    script, client = engine

    def stream(*lines: str):
        async def answer(request):
            return StreamingResponse(iter([f"data: {line}\n\n" for line in lines]), media_type="text/event-stream")

        return answer

    script.answers["/generate"] = [
        stream('{"output_ids": [1]}', '{"output_ids": [1, 2]}', "[DONE]"),
        stream('{"output_ids": [1]}'),
        stream('{"error": {"message": "out of memory"}}'),
        (400, {"error": {"message": "no"}}),
    ]
    chunks = [c async for c in client.generate_stream({"input_ids": [1]})]
    assert [c["output_ids"] for c in chunks] == [[1], [1, 2]]
    for error, words in ((EngineUnreachable, "without"), (EngineFailed, "out of memory"), (EngineRejected, "400: no")):
        with pytest.raises(error, match=words):
            [c async for c in client.generate_stream({"input_ids": [1]})]
    assert all(body["stream"] for body in script.seen("/generate"))


async def test_a_closed_client_stays_closed(engine):
    _, client = engine
    await client.health()
    await client.close()
    with pytest.raises(EngineUnreachable, match="this client was closed"):
        await client.health()


async def test_one_connection_serves_call_after_call(engine):
    _, client = engine
    for _ in range(20):
        await client.model_info()
    session = client._http.open_session()
    assert sum(len(c) for c in session.connector._conns.values()) == 1
