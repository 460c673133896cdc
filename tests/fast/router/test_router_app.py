"""The router process, over HTTP: affinity, engines that leave and return, answers as the engines gave them."""

from __future__ import annotations

import asyncio

import httpx
import orjson
import pytest

from miles.backends.engine_api.errors import EngineFailed, EngineRejected, EngineTimeout, EngineUnreachable
from miles.router.app import RouterConfig, create_app
from miles.router.members import EngineAddress, Members
from tests.fast.router.test_engine_pool import FakeClient

KEY = {"authorization": "Bearer run"}


class Engine(FakeClient):
    """Tells what it was sent, with metadata that a router must not touch."""

    def __init__(self, address: EngineAddress) -> None:
        super().__init__(address.url)
        self.dp_ranks, self.base_url, self.cancelled = address.dp_ranks, address.url, 0

    async def generate(self, payload, *, timeout_s=None, routing_key=None):
        try:
            answer = await super().generate(payload)
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        meta = {"weight_version": "3", "routed_experts": "AAAA", "output_token_logprobs": [[-0.5, 7, None]]}
        return answer | {"rank": payload.get("routed_dp_rank"), "meta_info": meta}

    async def generate_stream(self, payload, *, timeout_s=None, routing_key=None):
        self.seen.append(payload)
        for n in range(3):
            if self.plan:
                raise self.plan.pop(0)
            yield {"n": n}

    async def close(self):
        self.is_healthy = False


class Fleet(Members):
    def _client(self, address):
        return Engine(address)


@pytest.fixture
async def router():
    """`router.http`, and `router[i]`, its engines."""
    members = Fleet(request_timeout_s=1.0, recovery_timeout_s=0.3)
    transport = httpx.ASGITransport(app=create_app(RouterConfig(key="run"), members))
    async with httpx.AsyncClient(transport=transport, base_url="http://router") as http:
        yield Router(members, http)


class Router:
    def __init__(self, members: Members, http: httpx.AsyncClient) -> None:
        self.members, self.http = members, http

    def __getitem__(self, index: int) -> Engine:
        return self.members._known[index][1]

    async def name(self, *ranks: int) -> None:
        body = {i: {"url": f"http://engine-{i}", "dp_ranks": n} for i, n in enumerate(ranks)}
        reply = await self.http.put("/engines", content=orjson.dumps(body, option=orjson.OPT_NON_STR_KEYS), headers=KEY)
        assert reply.status_code == 204, reply.text

    async def ask(self, key: str | None = None, **body) -> dict:
        headers = {} if key is None else {"X-SMG-Routing-Key": key}
        reply = await self.http.post("/generate", json={"input_ids": [1]} | body, headers=headers)
        assert reply.status_code == 200, reply.text
        return reply.json()


async def test_a_key_keeps_its_engine_and_rank_and_new_keys_spread(router):
    await router.name(1, 3)
    router[0].gate.clear()
    router[1].gate.clear()
    asked = [asyncio.create_task(router.ask(f"k{n}")) for n in range(4)]
    await asyncio.sleep(0.05)
    router[0].gate.set()
    router[1].gate.set()
    places = [(a["engine"], a["rank"]) for a in await asyncio.gather(*asked)]
    assert sorted({engine for engine, _ in places}) == ["http://engine-0", "http://engine-1"]
    assert sorted(rank for engine, rank in places if rank is not None) == [0, 1]
    for n, place in enumerate(places):
        again = [await router.ask(f"k{n}"), await router.ask(routing_key=f"k{n}")]  # as header, as field
        assert [(a["engine"], a["rank"]) for a in again] == [place] * 2


async def test_answers_are_the_engines_own(router):
    await router.name(1)
    answer = await router.ask("k")
    assert answer["meta_info"] == {
        "weight_version": "3",
        "routed_experts": "AAAA",
        "output_token_logprobs": [[-0.5, 7, None]],
    }
    reply = await router.http.post("/generate", json={"stream": True})
    assert reply.text == 'data: {"n":0}\n\ndata: {"n":1}\n\ndata: {"n":2}\n\ndata: [DONE]\n\n'


async def test_a_stream_that_breaks_says_so_and_one_that_never_began_is_tried_elsewhere(router):
    await router.name(1, 1)
    router[0].plan = [EngineUnreachable("gone")]
    router[0].is_healthy = False
    reply = await router.http.post("/generate", json={"stream": True})
    assert reply.text.endswith("[DONE]\n\n") and "error" not in reply.text and router[1].seen


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (EngineRejected("too long", 422), 422),
        (EngineRejected("whose run?", 401), 400),
        (EngineFailed("broken", 500), 502),
        (EngineTimeout("slow"), 504),
    ],
)
async def test_what_an_engine_refuses_keeps_its_reason(router, error, status):
    await router.name(1)
    router[0].plan = [error] * 8
    reply = await router.http.post("/generate", json={"input_ids": [1]})
    # An engine that does not answer is taken for dead; then there is none.
    assert (reply.status_code, str(error) in reply.text) in ((status, True), (503, True)), reply.text


async def test_without_engines_a_request_waits_and_then_hears_why(router):
    waiting = asyncio.create_task(router.ask("k"))
    await asyncio.sleep(0.05)
    await router.name(1)
    assert (await waiting)["engine"] == "http://engine-0"
    await router.http.put("/engines", json={}, headers=KEY)
    reply = await router.http.post("/generate", json={"input_ids": [1]})
    assert reply.status_code == 503 and "no engine has served" in reply.text


async def test_an_engine_leaves_after_some_failed_checks_and_returns_after_one_good_one(router):
    await router.name(1, 1)
    assert (await router.ask("k"))["engine"] == "http://engine-0"
    router[0].is_healthy = False
    for _ in range(2):
        await router.members.probe(3)
    assert router.members.pool.healthy() == [0, 1]
    await router.members.probe(3)
    assert router.members.pool.healthy() == [1]
    await router.name(1, 1)  # naming it again does not make it healthy
    assert router.members.pool.healthy() == [1]
    assert (await router.ask("k"))["engine"] == "http://engine-1"
    listed = (await router.http.get("/list_workers")).json()
    assert [w["is_healthy"] for w in listed["workers"]] == [False, True]
    router[0].is_healthy = True
    await router.members.probe(3)
    assert router.members.pool.healthy() == [0, 1]


async def test_engines_by_url_as_older_clients_add_them(router):
    first = await router.http.post("/add_worker?url=http://a:1", headers=KEY)
    await router.http.post("/workers", json={"url": "http://b:2/", "dp_ranks": 2}, headers=KEY)
    again = await router.http.post("/add_worker", json={"worker_url": "http://b:2"}, headers=KEY)
    assert first.json() == {"status": "success", "worker_urls": {"http://a:1": 0}}
    assert again.json()["worker_urls"] == {"http://a:1": 0, "http://b:2": 0}
    assert (await router.http.get("/list_workers")).json()["urls"] == ["http://a:1", "http://b:2"]
    assert router.members.addresses[1] == EngineAddress("http://b:2", 2)


@pytest.mark.parametrize(
    ("method", "path", "body", "headers", "status"),
    [
        ("POST", "/add_worker", b"{}", KEY, 400),
        ("POST", "/workers", b'{"url": "b:2"}', KEY, 400),
        ("POST", "/workers", b'{"url": "http://b", "dp_ranks": "two"}', KEY, 400),
        ("POST", "/workers", b'{"url": "http://b"}', {}, 401),
        ("PUT", "/engines", b"[1]", KEY, 400),
        ("PUT", "/engines", b'{"0": {"uri": "x"}}', KEY, 400),
        ("PUT", "/engines", b"{}", {"authorization": "Bearer other"}, 401),
        ("POST", "/abort_request", b'{"abort_all": true}', {}, 401),
        ("POST", "/generate", b'{"input_ids": [1', {}, 400),
        ("POST", "/generate", b'"\xff"', {}, 400),
        ("POST", "/generate", b"[]", {}, 400),
        ("POST", "/flush_cache", b"", KEY, 404),
        ("POST", "/update_weights_from_disk", b"{}", KEY, 404),
    ],
)
async def test_what_a_router_refuses(router, method, path, body, headers, status):
    await router.name(1)
    reply = await router.http.request(method, path, content=body, headers=headers)
    assert reply.status_code == status, reply.text
    assert not router[0].seen and router.members.addresses == {0: EngineAddress("http://engine-0")}


async def test_abort_reaches_running_and_waiting_requests(router):
    await router.name(1)
    router[0].gate.clear()
    running = asyncio.create_task(router.ask("k"))
    await asyncio.sleep(0.02)
    assert (await router.http.post("/abort_request", json={"abort_all": True}, headers=KEY)).status_code == 200
    assert (await running)["aborted"]
