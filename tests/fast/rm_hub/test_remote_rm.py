"""A reward server: answers, refusals, outages, silence."""

import asyncio
import socket

import pytest
from aiohttp import web

from miles.rollout.rm_hub import RewardFailure, async_rm, close_rewards, remote_rm

from .conftest import finished


class Server:
    """Answers with `replies` in turn, the last one for ever; notes what it was asked."""

    def __init__(self):
        self.replies, self.asked, self.connections = [], [], set()

    async def handle(self, request):
        self.connections.add(request.transport)
        self.asked.append(await request.json())
        reply = self.replies.pop(0) if len(self.replies) > 1 else self.replies[0]
        return await reply() if callable(reply) else reply


def ok(value):
    async def reply():
        return web.json_response(value)

    return reply


def status(code, text="no"):
    async def reply():
        return web.Response(status=code, text=text)

    return reply


async def silence():
    await asyncio.sleep(60)


@pytest.fixture
async def server(args, monkeypatch):
    monkeypatch.setattr(remote_rm, "_FIRST_PAUSE_S", 0.01)
    server = Server()
    app = web.Application()
    app.router.add_post("/score", server.handle)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    port = site._server.sockets[0].getsockname()[1]
    args.rm_type, args.rm_url = "remote_rm", f"http://127.0.0.1:{port}/score"
    yield server
    await close_rewards()
    await runner.cleanup()


async def test_prompt_response_and_label_are_sent_and_the_number_comes_back(args, server):
    server.replies = [ok(0.75)]
    assert await async_rm(args, finished("r", "l", prompt="p")) == 0.75
    assert server.asked == [{"prompt": "p", "response": "r", "label": "l"}]
    args.rm_type = "boxed_remote_rm"
    await async_rm(args, finished(r"so \boxed{4}", "4"))
    assert server.asked[-1]["response"] == "4"


async def test_one_session_serves_all_samples(args, server):
    server.replies = [ok(1)]
    for i in range(10):
        await async_rm(args, finished(index=i))
    assert len(server.connections) == 1


async def test_an_overloaded_server_is_asked_again(args, server):
    server.replies = [status(503), status(500), ok({"score": 1})]
    args.reward_key = "score"
    assert await async_rm(args, finished()) == {"score": 1.0}
    assert len(server.asked) == 3


@pytest.mark.parametrize(
    "reply, asked, category, message",
    [
        (status(400, "label is missing"), 1, "reward_error", "answered 400: label is missing"),
        (status(503), 4, "reward_error", "answered 503"),
        (status(200, "<html>"), 1, "reward_error", "sent no JSON"),
        (ok(None), 1, "reward_none", "returned None"),
        (ok("good"), 1, "reward_type", "returned a str"),
        (ok({"score": 1}), 1, "reward_type", "set --reward-key"),
    ],
)
async def test_other_answers_are_failures(args, server, reply, asked, category, message):
    server.replies = [reply]
    with pytest.raises(RewardFailure, match=message) as caught:
        await async_rm(args, finished())
    assert caught.value.category == category and len(server.asked) == asked


async def test_a_silent_server_times_out(args, server):
    server.replies = [silence]
    args.reward_timeout = 0.3
    with pytest.raises(RewardFailure, match=r"did not score sample 5 within 0\.3 s") as caught:
        await async_rm(args, finished(index=5))
    assert caught.value.category == "reward_timeout"


async def test_a_server_that_is_not_there_is_named(args, monkeypatch):
    monkeypatch.setattr(remote_rm, "_FIRST_PAUSE_S", 0.01)
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        args.rm_type, args.rm_url = "remote_rm", f"http://127.0.0.1:{unused.getsockname()[1]}/"
        with pytest.raises(RewardFailure, match="out of reach after 4 attempts"):
            await async_rm(args, finished())
    await close_rewards()
