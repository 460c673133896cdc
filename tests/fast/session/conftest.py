"""A session server in the test's own process, in front of an engine that samples from ids."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import httpx
import pytest

from miles.rollout.session.app import create_app
from miles.rollout.session.config import SessionConfig
from miles.rollout.session.http import Service
from miles.rollout.session.serve import build_service
from miles.rollout.session.wire import SessionSamples, decode_samples
from miles.rollout.tito.boundary import TitoTokenizer
from miles.rollout.tito.families import FAMILIES
from miles.utils.types import Sample
from tests.helpers.chat_families import FAMILY_TEMPLATES, make_family_tokenizer
from tests.helpers.session_engine import TokenEngine, log_prob

_tito: dict[str, TitoTokenizer] = {}


def tito_of(family: str) -> TitoTokenizer:
    if family not in _tito:
        _tito[family] = TitoTokenizer(make_family_tokenizer(FAMILY_TEMPLATES[family][0]), FAMILIES[family])
    return _tito[family]


@dataclass
class Server:
    """One server, its engine, and a client that knows the run's key."""

    service: Service
    engine: TokenEngine
    http: httpx.AsyncClient

    async def open(self, **body: Any) -> Chat:
        made = await self.http.post(
            "/sessions", json=body, headers={"authorization": f"Bearer {self.service.config.key}"}
        )
        assert made.status_code == 200, made.text
        return Chat(self, made.json()["session_id"], made.json()["api_key"])


@dataclass
class Chat:
    """One session, as an agent and as the rollout process see it."""

    server: Server
    id: str
    key: str

    @property
    def path(self) -> str:
        return f"/sessions/{self.id}.{self.key}"

    @property
    def session(self) -> Any:
        return self.server.service.store.sessions[self.id]

    async def post(self, messages: list[dict], **body: Any) -> httpx.Response:
        return await self.server.http.post(f"{self.path}/v1/chat/completions", json={"messages": messages, **body})

    async def say(self, messages: list[dict], **body: Any) -> dict[str, Any]:
        """The assistant's message."""
        answer = await self.post(messages, **body)
        assert answer.status_code == 200, answer.text
        return answer.json()["choices"][0]["message"]

    async def get(self) -> dict[str, Any]:
        answer = await self.server.http.get(self.path)
        assert answer.status_code == 200, answer.text
        return answer.json()

    async def samples(self, max_seq_len: int | None = None, metadata: dict | None = None) -> SessionSamples:
        body = {"max_seq_len": max_seq_len, "metadata": metadata}
        answer = await self.server.http.post(f"{self.path}/samples", json=body)
        assert answer.status_code == 200, answer.text
        return decode_samples(answer.content, Sample(index=3, label="x", metadata={"own": 1}))


@pytest.fixture
async def serve():
    """`serve(family, version="v1", say=None, **config)` starts a server."""
    clients = []

    def start(
        family: str = "qwen3", version: str = "v1", *, say: Any = None, stop: Any = None, **config: Any
    ) -> Server:
        tito = tito_of(family)
        engine = TokenEngine(tito, say, stop)
        fields = {"hf_checkpoint": "-", "version": version, "tito_model": family, "context_length": 4000}
        service = build_service(SessionConfig(**(fields | config)), tito, engine)
        transport = httpx.ASGITransport(app=create_app(service))
        client = httpx.AsyncClient(transport=transport, base_url="http://session")
        clients.append(client)
        return Server(service, engine, client)

    yield start
    for client in clients:
        await client.aclose()


def check_sample(sample: Sample) -> None:
    """Every trained token has the log-prob that the engine gave it in its place; every other one has none."""
    sample.validate()
    prompt = len(sample.tokens) - sample.response_length
    assert len(sample.loss_mask) == len(sample.rollout_log_probs) == sample.response_length
    for i, (mask, value) in enumerate(zip(sample.loss_mask, sample.rollout_log_probs, strict=True)):
        token = sample.tokens[prompt + i]
        if mask:
            assert value == log_prob(token, prompt + i)


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def tool(text: str, call_id: str = "c") -> dict[str, Any]:
    return {"role": "tool", "content": text, "tool_call_id": call_id}


TOOLS = [{"type": "function", "function": {"name": "get", "parameters": {"type": "object", "properties": {}}}}]
