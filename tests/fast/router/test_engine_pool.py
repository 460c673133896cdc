"""Which engine takes a request, and what happens to requests when engines die."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import pytest

from miles.backends.engine_api.errors import EngineFailed, EngineRejected, EngineTimeout, EngineUnreachable
from miles.router.engine_pool import EnginePool, NoEngineError

ARGS = SimpleNamespace(engine_start_timeout=0.3, weight_update_timeout=0.2)


class FakeClient:
    """Answers with its name; `plan` holds errors to raise first; `gate` holds answers back."""

    dp_ranks = 1

    def __init__(self, name: str, plan=(), healthy: bool = True, held: bool = False) -> None:
        self.name, self.plan, self.is_healthy = name, list(plan), healthy
        self.gate = asyncio.Event()
        self.seen: list[dict] = []
        self.aborts = 0
        if not held:
            self.gate.set()

    async def generate(self, payload, *, timeout_s=None, routing_key=None):
        self.seen.append(payload)
        if self.plan:
            raise self.plan.pop(0)
        await self.gate.wait()
        return {"engine": self.name, "aborted": self.aborts > 0}

    async def alive(self, *, timeout_s=None):
        if not self.is_healthy:
            raise EngineUnreachable("gone")

    async def abort(self, *, abort_all, timeout_s=None):
        self.aborts += 1
        if not self.is_healthy:
            raise EngineUnreachable("gone")
        self.gate.set()


def make_pool(*clients: FakeClient) -> EnginePool:
    pool = EnginePool(ARGS)
    for index, client in enumerate(clients):
        pool.set_engine(index, client)
    pool.deaths = []
    pool.on_dead = pool.deaths.append
    return pool


async def test_the_least_loaded_engine_takes_a_request_and_the_lowest_index_wins_ties():
    clients = [FakeClient(name, held=True) for name in "abc"]
    pool = make_pool(*clients)
    tasks = [asyncio.create_task(pool.generate({"n": n})) for n in range(7)]
    await asyncio.sleep(0)
    assert [[p["n"] for p in c.seen] for c in clients] == [[0, 3, 6], [1, 4], [2, 5]]
    assert [pool.load(i) for i in range(3)] == [3, 2, 2]
    for client in clients:
        client.gate.set()
    await asyncio.gather(*tasks)
    assert [pool.load(i) for i in range(3)] == [0, 0, 0]


async def test_a_routing_key_stays_on_its_engine_until_that_engine_dies():
    a, b = FakeClient("a", held=True), FakeClient("b")
    pool = make_pool(a, b)
    busy = asyncio.create_task(pool.generate({}))
    await asyncio.sleep(0)
    assert (await pool.generate({}, routing_key="s"))["engine"] == "b"
    a.gate.set()
    await busy
    assert (await pool.generate({}, routing_key="s"))["engine"] == "b"  # although a has the lower index
    pool.set_engine(1, None)
    assert (await pool.generate({}, routing_key="s"))["engine"] == "a"
    pool.set_engine(1, b)
    assert (await pool.generate({}, routing_key="s"))["engine"] == "a"  # its prefix is there now


async def test_a_dead_engine_is_reported_once_and_all_its_requests_finish_elsewhere():
    a = FakeClient("a", plan=[EngineUnreachable("reset")] * 3, healthy=False)
    pool = make_pool(a, FakeClient("b"))
    answers = await asyncio.gather(*(pool.generate({}) for _ in range(6)))
    assert [x["engine"] for x in answers] == ["b"] * 6
    assert pool.deaths == [0] and pool.healthy() == [1]


async def test_a_hung_engine_counts_as_dead():
    pool = make_pool(FakeClient("a", plan=[EngineTimeout("600 s")]), FakeClient("b"))
    assert (await pool.generate({}))["engine"] == "b"
    assert pool.deaths == [0]


async def test_a_lost_connection_to_a_healthy_engine_is_no_death():
    a = FakeClient("a", plan=[EngineUnreachable("keep-alive race")])
    pool = make_pool(a)
    assert (await pool.generate({"rid": "r"}))["engine"] == "a"
    assert pool.deaths == []
    # The engine may still know the first id; the new one begins with it, so that aborting r aborts both.
    assert [p["rid"] for p in a.seen] == ["r", "r-retry1"]


async def test_requests_wait_for_the_replacement_of_the_only_engine():
    pool = make_pool(FakeClient("a", plan=[EngineUnreachable("killed")], healthy=False))
    task = asyncio.create_task(pool.generate({}))
    await asyncio.sleep(0.05)
    assert pool.deaths == [0] and not task.done()
    pool.set_engine(0, FakeClient("a again"))
    assert (await task)["engine"] == "a again"


async def test_without_a_replacement_the_wait_ends_and_says_what_died():
    pool = make_pool(FakeClient("a", plan=[EngineUnreachable("killed")], healthy=False))
    with pytest.raises(NoEngineError, match=r"no engine has served for 0.5 s .*engine 0: killed"):
        await pool.generate({})
    with pytest.raises(NoEngineError):
        await pool.wait_any(0.01)


async def test_when_recovery_is_given_up_waiting_and_later_requests_raise_its_error():
    pool = make_pool()
    task = asyncio.create_task(pool.generate({}))
    await asyncio.sleep(0)
    pool.fail(RuntimeError("restarted too often"))
    for awaited in (task, pool.generate({}), pool.wait_any()):
        with pytest.raises(RuntimeError, match="restarted too often"):
            await awaited


async def test_a_refused_request_is_not_tried_again():
    a, b = FakeClient("a", plan=[EngineRejected("input too long", 400)]), FakeClient("b")
    pool = make_pool(a, b)
    with pytest.raises(EngineRejected, match="too long"):
        await pool.generate({})
    assert (len(a.seen), len(b.seen), pool.deaths) == (1, 0, [])


async def test_a_failure_is_tried_on_another_engine_and_only_a_few_times():
    pool = make_pool(FakeClient("a", plan=[EngineFailed("500", 500)]), FakeClient("b"))
    assert (await pool.generate({}))["engine"] == "b"
    always = FakeClient("a", plan=[EngineFailed("500", 500)] * 100)
    pool = make_pool(always)
    with pytest.raises(EngineFailed):
        await pool.generate({})
    assert len(always.seen) == 4 and pool.deaths == []


async def test_abort_all_ends_running_requests_and_those_without_an_engine():
    held = FakeClient("a", held=True)
    pool = make_pool(held)
    running = asyncio.create_task(pool.generate({}))
    await asyncio.sleep(0)
    await pool.abort_all()
    assert (await running)["aborted"]
    pool.set_engine(0, None)
    waiting = asyncio.create_task(pool.generate({"rid": "r", "input_ids": [1, 2, 3]}))
    batch = asyncio.create_task(pool.generate({"input_ids": [[1], [2]]}))
    await asyncio.sleep(0)
    await pool.abort_all()
    answer = await waiting
    assert answer["output_ids"] == [] and answer["meta_info"]["finish_reason"]["type"] == "abort"
    assert answer["meta_info"]["prompt_tokens"] == 3
    assert [a["output_ids"] for a in await batch] == [[], []]


async def test_abort_all_catches_a_request_whose_engine_dies_meanwhile():
    pool = make_pool(FakeClient("a", held=True, healthy=False))
    task = asyncio.create_task(pool.generate({}))
    await asyncio.sleep(0)
    aborting = asyncio.create_task(pool.abort_all())
    await asyncio.sleep(0)
    task.cancel()  # stands for the connection that breaks with the process
    await asyncio.wait_for(aborting, 2)


async def test_abort_all_has_a_deadline_and_leaves_later_requests_alone():
    held = FakeClient("a", held=True)

    async def deaf(**_):
        held.aborts += 1

    held.abort = deaf
    pool = make_pool(held)
    task = asyncio.create_task(pool.generate({}))
    await asyncio.sleep(0)
    with pytest.raises(EngineTimeout, match="1 requests were still running"):
        await pool.abort_all(timeout_s=0.3)
    held.gate.set()
    await task
    held.aborts = 0
    assert (await pool.generate({}))["aborted"] is False


async def test_a_key_keeps_its_data_parallel_rank_and_new_keys_take_the_emptiest():
    wide, narrow = FakeClient("wide", held=True), FakeClient("narrow", held=True)
    wide.dp_ranks = 3
    pool = make_pool(wide, narrow)
    tasks = [asyncio.create_task(pool.generate({"n": n}, f"key {n}")) for n in range(6)]
    await asyncio.sleep(0)
    assert [p["routed_dp_rank"] for p in wide.seen] == [0, 1, 2]
    assert all("routed_dp_rank" not in p for p in narrow.seen)
    for client in (wide, narrow):
        client.gate.set()
    await asyncio.gather(*tasks)
    await pool.generate({}, "key 4")
    assert wide.seen[-1]["routed_dp_rank"] == 2  # also when the others are idle
    await pool.generate({})
    assert "routed_dp_rank" not in wide.seen[-1]  # without a key, the engine itself spreads


async def test_a_key_whose_rank_is_gone_gets_another_place():
    wide = FakeClient("wide")
    wide.dp_ranks = 2
    pool = make_pool(wide)
    for n in range(2):
        await pool.generate({}, f"key {n}")
    wide.dp_ranks = 1
    await pool.generate({}, "key 1")
    assert "routed_dp_rank" not in wide.seen[-1]
