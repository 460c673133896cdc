"""v2 over HTTP: where requests attach, which leaves train, and each shared turn once."""

from __future__ import annotations

import asyncio
from collections import Counter

import pytest

from miles.rollout.session.history import MAX_NODES, Position, Tree, Turn
from miles.rollout.tito.matchers import strict
from miles.utils.imports import register_function
from miles.utils.types import SampleStatus
from tests.fast.session.conftest import TOOLS, Chat, check_sample, tool, user


async def grow(chat: Chat, messages: list[dict], *texts: str) -> list[dict]:
    """Say each text after the conversation so far; returns the conversation."""
    for text in texts:
        messages = [*messages, user(text)]
        messages = [*messages, await chat.say(messages)]
    return messages


def parents(chat: Chat) -> list[int | None]:
    return [None if n.parent is None else n.parent.seq for n in chat.session.history.nodes]


def trained_by(samples: list) -> Counter:
    """How many samples train each generation, by its tokens' places: counts masks, not claims."""
    counts: Counter = Counter()
    for sample in samples:
        check_sample(sample)
        counts[sample.metadata["leaf"]["node_id"]] += sum(sample.loss_mask)
    return counts


async def test_a_line_is_the_sample_that_v1_gives(serve):
    got = []
    for version in ("v1", "v2"):
        chat = await serve(version=version).open()
        await grow(chat, [], "a", "b", "c")
        [sample] = (await chat.samples()).samples
        got.append((sample.tokens, sample.loss_mask, sample.rollout_log_probs, sample.response, sample.version_spans))
    assert got[0] == got[1]


async def test_a_fork_shares_what_came_before_and_trains_it_once(serve):
    chat = await serve(version="v2").open()
    base = await grow(chat, [], "a", "b")
    await grow(chat, base, "left", "left on")
    await grow(chat, base, "right", "right on")
    assert parents(chat) == [None, 0, 1, 2, 1, 4]
    samples = (await chat.samples()).samples
    assert [s.metadata["leaf"]["node_id"] for s in samples] == [5, 3]
    nodes = chat.session.history.nodes
    size = [len(n.turn.output_ids) for n in nodes]
    assert trained_by(samples) == {3: size[0] + size[1] + size[2] + size[3], 5: size[4] + size[5]}
    rows = {s.metadata["leaf"]["node_id"]: s.tokens for s in samples}
    assert rows == {3: nodes[3].row().tolist(), 5: nodes[5].row().tolist()}


async def test_a_retry_counts_once_and_a_chain_of_retries_too(serve):
    chat = await serve(version="v2").open()
    base = await grow(chat, [], "a")
    for _ in range(3):
        await chat.say([*base, user("b")])
    assert parents(chat) == [None, 0, 0, 0]
    samples = (await chat.samples()).samples
    assert [s.metadata["leaf"]["node_id"] for s in samples] == [3]
    assert trained_by(samples)[3] == sum(len(chat.session.history.nodes[i].turn.output_ids) for i in (0, 3))


async def test_sub_agents_that_run_at_once_all_train(serve):
    server = serve(version="v2")
    chat = await server.open()
    base = await grow(chat, [], "a")
    server.engine.gate.clear()
    tasks = [asyncio.create_task(chat.post([*base, user("same task")])) for _ in range(3)]
    while len(server.engine.prompts) < 4:
        await asyncio.sleep(0.01)
    server.engine.gate.set()
    assert [r.status_code for r in await asyncio.gather(*tasks)] == [200, 200, 200]
    samples = (await chat.samples()).samples
    assert len(samples) == 3
    first = chat.session.history.nodes[0]
    shared = [
        sum(s.loss_mask[: len(first.turn.output_ids)])
        for s in sorted(samples, key=lambda s: s.metadata["leaf"]["node_id"])
    ]
    assert shared == [len(first.turn.output_ids), 0, 0]


async def test_sub_agents_one_after_another_with_other_tasks_all_train(serve):
    chat = await serve(version="v2").open()
    base = await grow(chat, [], "a")
    for task in ("one", "two"):
        await chat.say([*base, user(task)])
    assert len((await chat.samples()).samples) == 2


async def test_a_line_that_went_on_is_no_retry(serve):
    chat = await serve(version="v2").open()
    base = await grow(chat, [], "a", "b", "c")
    await chat.say([*base[:2], user("b")])  # asks for b again, although c followed it
    assert parents(chat) == [None, 0, 1, 0]
    assert len((await chat.samples()).samples) == 2


async def test_compaction_that_rewrites_an_answer(serve):
    """The match stops before it; the rewritten answer is prompt, and trains nothing."""
    server = serve(version="v2")
    chat = await server.open()
    base = await grow(chat, [], "a", "b")
    summary = [*base[:3], {"role": "assistant", "content": "in short"}, user("go on")]
    await chat.say(summary)
    assert parents(chat) == [None, 0, 0]
    text = server.service.recorder.tito.encoder.decode(server.engine.prompts[-1])
    assert "in short" in text
    samples = (await chat.samples()).samples
    assert sum(map(lambda s: sum(s.loss_mask), samples)) == sum(
        len(n.turn.output_ids) for n in chat.session.history.nodes
    )


async def test_another_beginning_is_another_root(serve):
    chat = await serve(version="v2").open()
    await grow(chat, [], "a")
    await grow(chat, [], "z")
    await chat.say([user("a")], tools=TOOLS)  # other tools: another system prompt
    assert parents(chat) == [None, None, None]
    facts = (await chat.get())["metadata"]
    assert facts["session"]["new_roots"] == 2
    assert [leaf["path_node_ids"] for leaf in facts["tree"]["leaves"]] == [[0], [1], [2]]
    strict_chat = await serve(version="v2", strict_history=True).open()
    await grow(strict_chat, [], "a")
    assert (await strict_chat.post([user("z")])).status_code == 400


async def test_a_branch_before_a_cut_off_turn_is_fine(serve):
    chat = await serve(version="v2").open()
    base = await grow(chat, [], "a")
    cut = await chat.say([*base, user("b")], max_tokens=2)
    assert (await chat.post([*base, user("b"), cut, user("c")])).status_code == 409
    await chat.say([*base, user("c")])
    statuses = {s.metadata["leaf"]["node_id"]: s.status for s in (await chat.samples()).samples}
    assert statuses == {1: SampleStatus.TRUNCATED, 2: SampleStatus.COMPLETED}


async def test_each_branch_has_a_key_of_its_own(serve):
    server = serve(version="v2")
    chat = await server.open()
    base = await grow(chat, [], "a", "b")
    left = await grow(chat, base, "left")
    right = await grow(chat, base, "right")
    await grow(chat, left, "left on")
    await grow(chat, right, "right on")
    keys = server.engine.keys
    assert keys[0] == keys[1] == keys[2] == keys[4] and keys[3] == keys[5] and keys[3] != keys[0]


async def test_hooks_are_held_to_their_contract(serve):
    def picks(name, hook):
        register_function(f"tests.{name}", hook)
        return f"tests.{name}"

    async def outcome(**config):
        chat = await serve(version="v2", **config).open()
        base = await grow(chat, [], "a")
        for task in ("one", "two"):
            await chat.say([*base, user(task)])
        return await chat.server.http.post(f"{chat.path}/samples", json={}), chat

    def boom(samples, metadata):
        raise RuntimeError("no")

    for hook in (boom, lambda s, m: [*s, s[0]], lambda s, m: [object()], lambda s, m: s[0]):
        answer, chat = await outcome(picker=picks("bad", hook))
        assert answer.status_code == 422 and "tests.bad" in answer.text
        assert (await chat.get())["metadata"]["tree"]  # the server lives
    answer, _ = await outcome(postprocessor=picks("drops", lambda s, m: s[1:]))
    assert answer.status_code == 422 and "only the picker may" in answer.text
    # A picker that keeps one leaf makes it the owner of what it shares.
    answer, chat = await outcome(
        picker=picks("last", lambda s, m: [x for x in s if x.metadata["leaf"]["node_id"] == 2])
    )
    [sample] = (await chat.samples()).samples
    assert sum(sample.loss_mask) == sum(len(chat.session.history.nodes[i].turn.output_ids) for i in (0, 2))


async def test_tool_results_of_sub_agents_attach_where_they_belong(serve):
    def say(text):
        return "done" if "<tool_response>" in text else '<tool_call>\n{"name": "get", "arguments": {}}\n</tool_call>'

    chat = await serve(version="v2", say=say).open()
    one = await chat.say([user("q")], tools=TOOLS)
    call_id = one["tool_calls"][0]["id"]
    await chat.say([user("q"), one, tool("4", call_id)], tools=TOOLS)
    await chat.say([user("q"), one, tool("5", call_id)], tools=TOOLS)
    assert parents(chat) == [None, 0, 0]
    for sample in (await chat.samples()).samples:
        check_sample(sample)
        assert sample.metadata["tito_session_mismatch"] == [] or sample.metadata["session"]


# ---- the search alone ------------------------------------------------------------------------------------------------


def _turn() -> Turn:
    import numpy as np

    ids = np.array([1], np.int32)
    return Turn(ids, ids, np.array([-1.0]), 0, (), "stop", "r", 0.0, 0.0)


def _said(text: str) -> dict:
    return {"role": "assistant", "content": text}


def test_the_latest_of_equal_places_wins_and_placing_changes_nothing():
    tree = Tree(strict)
    for _ in range(2):
        tree.commit(Position(None, [user("a")]), _said("same"), _turn(), "id")
    before = list(tree.nodes)
    assert tree.place([user("a"), _said("same"), user("b")], "id").parent is tree.nodes[1]
    assert tree.place([user("a")], "id").parent is None
    assert tree.place([user("a"), _said("same")], "other tools").parent is None
    assert tree.nodes == before and tree.counts.new_roots == 1


def test_a_very_deep_line_is_searched_and_full_sessions_refuse():
    from miles.rollout.session.errors import RequestRefused

    tree, messages = Tree(strict), []
    for i in range(MAX_NODES):
        messages.append(user(str(i)))
        node = tree.commit(
            tree.place(messages, "id") if i < 3 else Position(tree.head, messages[-1:]), _said("x"), _turn(), "id"
        )
        messages.append(_said("x"))
    assert node.parent is tree.nodes[-2] and len(tree.nodes) == MAX_NODES
    with pytest.raises(RequestRefused, match="1024 generations"):
        tree.place(messages, "id")
    tree.next_seq = 0
    assert tree.place([*messages, user("z")], "id").parent is node
