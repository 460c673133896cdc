"""A request to two servers that must meet: what each is sent, and what the answer is made of."""

from __future__ import annotations

import asyncio

import pytest

from miles.backends.engine_api.errors import EngineFailed, EngineUnreachable
from miles.router.prefill_decode import PrefillDecodeClient


class Server:
    """Stands for an EngineClient."""

    def __init__(self, name: str, logprobs: list, version: str = "3", error: Exception | None = None) -> None:
        self.base_url, self.logprobs, self.version, self.error = f"http://{name}:30000", logprobs, version, error
        self.bodies: list[dict] = []
        self.aborted: list = []
        self.cancelled = False

    async def bootstrap_port(self) -> int:
        return 8998

    async def generate(self, payload, *, timeout_s=None):
        self.bodies.append(payload)
        try:
            await asyncio.sleep(0.01 if self.error or self.logprobs else 5)
        except asyncio.CancelledError:
            self.cancelled = True
            raise
        if self.error:
            raise self.error
        one = {"output_ids": [1], "meta_info": {"weight_version": self.version, "input_token_logprobs": self.logprobs}}
        many = isinstance(payload["input_ids"][0], list)
        return [{**one, "meta_info": dict(one["meta_info"])} for _ in payload["input_ids"]] if many else one

    async def abort(self, rid=None, *, abort_all=False, timeout_s=None):
        self.aborted.append(rid)


PROMPT = [[None, 7, None], [-0.5, 8, None]]


async def test_both_get_the_request_and_the_same_room_and_prefills_take_turns():
    prefills, decode = [Server("p0", PROMPT), Server("p1", PROMPT)], Server("d", [[-1.0, 9, None]])
    client = PrefillDecodeClient(decode, prefills)
    answers = [await client.generate({"input_ids": [7, 8], "rid": str(i)}) for i in range(3)]
    assert [len(p.bodies) for p in prefills] == [2, 1] and len(decode.bodies) == 3
    body = decode.bodies[0]
    assert body == prefills[0].bodies[0] and (body["bootstrap_host"], body["bootstrap_port"]) == ("p0", 8998)
    assert len({b["bootstrap_room"] for b in decode.bodies}) == 3
    assert answers[0]["meta_info"]["input_token_logprobs"] == [*PROMPT, [-1.0, 9, None]]
    await client.abort("2")
    assert [s.aborted for s in (decode, *prefills)] == [["2"]] * 3


async def test_each_request_of_a_batch_has_a_room():
    prefill, decode = Server("p", PROMPT), Server("d", [[-1.0, 9, None]])
    answers = await PrefillDecodeClient(decode, [prefill]).generate({"input_ids": [[1], [2]]})
    assert len(set(decode.bodies[0]["bootstrap_room"])) == 2 and decode.bodies[0]["bootstrap_host"] == ["p", "p"]
    assert [len(a["meta_info"]["input_token_logprobs"]) for a in answers] == [3, 3]


async def test_a_failure_of_one_ends_the_wait_for_the_other():
    prefill, decode = Server("p", PROMPT, error=EngineUnreachable("gone")), Server("d", [])
    with pytest.raises(EngineUnreachable, match="gone"):
        await PrefillDecodeClient(decode, [prefill]).generate({"input_ids": [1]})
    await asyncio.sleep(0)
    assert decode.cancelled


async def test_prompts_and_tokens_of_different_weights_are_refused():
    client = PrefillDecodeClient(Server("d", [[-1.0, 9, None]], version="4"), [Server("p", PROMPT)])
    with pytest.raises(EngineFailed, match="weight version 4 and its prefill server 3"):
        await client.generate({"input_ids": [1]})
