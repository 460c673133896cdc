"""Agents that do everything wrong: whatever they send, trained ids are sampled ids, each kept completion trains once."""

from __future__ import annotations

import asyncio
import copy
import json
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from miles.rollout.session.chat_api import parse_chat
from miles.rollout.session.collect import Collector
from miles.rollout.session.config import SessionConfig
from miles.rollout.session.errors import SessionError
from miles.rollout.session.serve import build_service
from miles.rollout.session.store import SessionStore
from miles.rollout.session.wire import decode_samples, encode_samples
from miles.rollout.tito.template import MessageError
from miles.utils.types import Sample
from tests.fast.session.conftest import TOOLS, check_sample, tito_of, user
from tests.helpers.session_engine import TokenEngine, words

REPLIES = {
    "qwen3": '<think>\nhm {0}\n</think>\n\n{0}<tool_call>\n{{"name": "get", "arguments": {{"b": 1, "a": "{0}"}}}}\n</tool_call>',
    "glm47": "hm</think>{0}<tool_call>get<arg_key>a</arg_key><arg_value>{0}</arg_value></tool_call>",
    "kimi26": "{0}<|tool_calls_section_begin|><|tool_call_begin|>functions.get:0<|tool_call_argument_begin|>"
    '{{"a": "{0}"}}<|tool_call_end|><|tool_calls_section_end|>',
}
_ACTIONS = (
    "go on",
    "go on",
    "go on",
    "retry",
    "fork",
    "drop reasoning",
    "reorder",
    "compact",
    "inject",
    "new",
    "cut",
    "no tools",
)


@st.composite
def agents(draw: st.DrawFn) -> list[tuple[str, int, str]]:
    text = st.sampled_from(["x", "", "<|im_end|><|user|>", "the and on\n\n", "</think>", '{"a": 1}', "é😀\U000f0001"])
    step = st.tuples(st.sampled_from(_ACTIONS), st.integers(0, 30), text)
    return draw(st.lists(step, min_size=1, max_size=9))


class Agent:
    """Plays a script against a server's core, and remembers every conversation that it had."""

    def __init__(self, family: str, version: str, matcher: str) -> None:
        tito = tito_of(family)
        self.engine = TokenEngine(tito)
        self.engine.say = self._say
        stops = [s for s in tito.family.stops if s in tito.encoder.special_ids]
        self.engine.stop = lambda text: stops[len(text) % len(stops)]
        self.family = family
        config = SessionConfig("-", version=version, tito_model=family, matcher=matcher, context_length=100_000)
        self.service = build_service(config, tito, self.engine)
        self.session = self.service.store.create()
        self.conversations: list[list[dict[str, Any]]] = [[user("begin")]]
        self.answered = 0

    def _say(self, text: str) -> str:
        said = words(self.engine.prompts[-1])
        return said if len(text) % 3 else REPLIES[self.family].format(said)

    def step(self, action: str, which: int, text: str) -> None:
        base = copy.deepcopy(
            self.conversations[
                -1 if action in ("go on", "retry", "cut", "no tools") else which % len(self.conversations)
            ]
        )
        body: dict[str, Any] = {"tools": TOOLS}
        if action == "new":
            base = [user(text or "again")]
        elif action == "fork" and len(base) > 2:
            base = base[: 1 + which % (len(base) - 1)]
        elif action == "drop reasoning":
            for message in base:
                message.pop("reasoning_content", None)
        elif action == "reorder":
            for message in base:
                for call in message.get("tool_calls") or ():
                    arguments = json.loads(call["function"]["arguments"])
                    call["function"]["arguments"] = json.dumps(dict(sorted(arguments.items())), separators=(",", ":"))
        elif action == "compact" and len(base) > 3:
            base = [base[0], {"role": "assistant", "content": "in short"}, *base[-1:]]
        elif action == "inject":
            base += [{"role": "assistant", "content": text}]
        elif action == "cut":
            body["max_tokens"] = 2
        elif action == "no tools":
            body = {}
        if action != "retry" or base[-1]["role"] == "assistant":
            base = self._with_news(base, text)
        self._ask(base, body)

    def _with_news(self, base: list[dict[str, Any]], text: str) -> list[dict[str, Any]]:
        calls = base[-1].get("tool_calls") if base else None
        if calls:
            return [*base, *({"role": "tool", "tool_call_id": c["id"], "content": text} for c in calls)]
        return [*base, user(text)] if not base or base[-1]["role"] == "assistant" else base

    def _ask(self, messages: list[dict[str, Any]], body: dict[str, Any]) -> None:
        before = [(n.seq, n.row_length) for n in self.session.history.nodes]
        recorder = self.service.recorder
        try:
            prepared = recorder.prepare(self.session, parse_chat({"messages": messages, **body}))
            answer = asyncio.run(recorder.generate(self.session, prepared))
        except (SessionError, MessageError):
            assert [(n.seq, n.row_length) for n in self.session.history.nodes] == before
            return
        self.answered += 1
        node = self.session.history.head
        # The engine saw exactly what is stored, and the parent's row is the beginning of it.
        assert self.engine.prompts[-1] == node.row()[: -len(node.turn.output_ids)].tolist()
        if node.parent is not None:
            kept = node.parent.row()[: node.parent.row_length - node.turn.drop].tolist()
            assert self.engine.prompts[-1][: len(kept)] == kept
        self.conversations.append([*messages, answer.message])


def _samples(agent: Agent) -> list[Sample]:
    content = agent.service.collector.collect(agent.session)
    return decode_samples(encode_samples(content), Sample(index=0)).samples


def _trained_once(paths: list[list[Any]]) -> int:
    """Sampled tokens of all turns, each counted in the earliest line that has it, less stop tokens that this line leaves out."""
    seen: set[int] = set()
    total = 0
    for path in sorted(paths, key=lambda path: path[-1].seq):
        for node, following in zip(path, [*path[1:], None], strict=True):
            if node.seq not in seen:
                seen.add(node.seq)
                total += len(node.turn.output_ids) - (following.turn.drop if following else 0)
    return total


@pytest.mark.parametrize(("family", "version"), [("qwen3", "v1"), ("qwen3", "v2"), ("glm47", "v2"), ("kimi26", "v1")])
@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(script=agents(), matcher=st.sampled_from(["strict", "loose_tool_call"]))
def test_trained_ids_are_sampled_ids(family, version, script, matcher):
    agent = Agent(family, version, matcher)
    for step in script:
        agent.step(*step)
    history = agent.session.history
    samples = _samples(agent)
    assert bool(samples) == bool(history.nodes)
    for sample in samples:
        check_sample(sample)
    paths = []
    for sample in samples:
        leaf = sample.metadata["leaf"]["node_id"] if version == "v2" else history.head.seq
        node = next(n for n in history.nodes if n.seq == leaf)
        assert sample.tokens == node.row().tolist()
        paths.append(node.path())
    assert sum(sum(sample.loss_mask) for sample in samples) == _trained_once(paths)
    if version == "v1":
        assert agent.answered == len(history.nodes) + history.counts.rollbacks
    else:
        assert agent.answered == len(history.nodes)


@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(script=agents(), version=st.sampled_from(["v1", "v2"]), cut=st.integers(1, 200))
def test_a_restarted_server_has_what_it_had(tmp_path_factory, script, version, cut):
    """Also when the last record was not written whole: then the turn that nobody was told of is gone, and no other."""
    from miles.rollout.session.history import new_history
    from miles.rollout.session.wal import SessionLog
    from miles.rollout.tito.matchers import strict

    folder = tmp_path_factory.mktemp("wal")
    agent = Agent("qwen3", version, "strict")
    store = agent.service.store
    store._log = SessionLog(folder)
    agent.session = store.create()
    for step in script:
        agent.step(*step)

    def again() -> SessionStore:
        make = lambda: new_history(version, strict)  # noqa: E731
        back = SessionStore(make, SessionLog(folder), idle_timeout_s=100, max_sessions=10, max_bytes=1 << 30)
        back.recover()
        return back

    def view(history: Any) -> list[tuple]:
        return [
            (n.seq, n.parent and n.parent.seq, n.row().tolist(), n.messages, n.identity, n.tools) for n in history.nodes
        ]

    back = again()
    assert view(back.get(agent.session.id, agent.session.key).history) == view(agent.session.history)
    agent.session = back.sessions[agent.session.id]
    collector = Collector(agent.service.config, agent.service.recorder.tito)
    assert [s.tokens for s in collector.collect(agent.session).samples] == [s.tokens for s in _samples(agent)]
    store._log.close()
    path = folder / f"{agent.session.id}.log"
    if not agent.session.history.nodes or (version == "v1" and agent.session.history.counts.rollbacks):
        return
    path.write_bytes(path.read_bytes()[:-cut] if cut < 150 else path.read_bytes() + b"\x01" * 5)
    lost = 1 if cut < 150 else 0
    shorter = again().sessions[agent.session.id].history
    assert view(shorter) == view(agent.session.history)[: len(agent.session.history.nodes) - lost]


def test_a_damaged_log_is_a_lost_session_not_half_a_one(tmp_path):
    from miles.rollout.session.errors import SessionNotFound
    from miles.rollout.session.wal import SessionLog

    agent = Agent("qwen3", "v2", "strict")
    store = agent.service.store
    store._log = SessionLog(tmp_path)
    agent.session = store.create()
    for _ in range(3):
        agent.step("go on", 0, "x")
    path = tmp_path / f"{agent.session.id}.log"
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 0xFF
    path.write_bytes(bytes(data))
    back = SessionStore(lambda: None, SessionLog(tmp_path), idle_timeout_s=9, max_sessions=9, max_bytes=9)
    back.recover()
    with pytest.raises(SessionNotFound, match="log is damaged"):
        back.get(agent.session.id, agent.session.key)
