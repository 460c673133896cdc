"""Which replayed messages are taken for the stored one."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from miles.rollout.tito.matchers import MatcherError, loose_tool_call, resolve_matcher, role_content_only, strict
from miles.utils.imports import register_function


def call(arguments: Any = '{"a": 1}', **fields: Any) -> dict[str, Any]:
    return {"id": "c1", "type": "function", "function": {"name": "get", "arguments": arguments}} | fields


def said(*calls: dict[str, Any], **fields: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": None, **({"tool_calls": list(calls)} if calls else {}), **fields}


@pytest.mark.parametrize(
    ("stored", "replayed"),
    [
        (said(), said(content="")),
        (said(), said(content=[], tool_calls=None, reasoning_content="")),
        (said(content="hi"), said(content=[{"type": "text", "text": "hi"}])),
        (said(content="hi you"), said(content=[{"type": "text", "text": "hi "}, {"type": "text", "text": "you"}])),
        (said(call()), said(call(index=0))),
        (said(content="x"), said(content="x", refusal=None, provider="acme")),
    ],
)
def test_strict_takes_what_only_looks_different(stored, replayed):
    assert strict(stored, replayed) and strict(replayed, stored)


@pytest.mark.parametrize(
    ("stored", "replayed"),
    [
        (said(content=""), said(content="\n")),
        (said(content="x"), said(content="x", reasoning_content="y")),
        (said(call()), said(call('{"a":1}'))),
        (said(call(id="c1")), said({k: v for k, v in call().items() if k != "id"})),
        (said(call(id=None)), said({k: v for k, v in call().items() if k != "id"})),
        (said(call({"a": True})), said(call({"a": 1}))),
        (said(call({"a": 1})), said(call({"a": 1.0}))),
        (
            {"role": "tool", "content": "4", "tool_call_id": "c1"},
            {"role": "tool", "content": "4", "tool_call_id": "c2"},
        ),
        ({"role": "tool", "content": "4", "name": "get"}, {"role": "tool", "content": "4", "name": "find"}),
    ],
)
def test_strict_refuses_what_is_different(stored, replayed):
    assert not strict(stored, replayed) and not strict(replayed, stored)


@pytest.mark.parametrize(
    ("a", "b"),
    [
        ('{"a": 1, "b": [2]}', '{"b":[2.0],"a":1e0}'),
        ("", "{}"),
        (None, "{}"),
        ('{"a": "é"}', '{"a": "\\u00e9"}'),
        ({"a": {"b": None}}, '{"a":{"b":null}}'),
        ('{"a": 100000000000000000000000001}', '{"a":1.00000000000000000000000001e26}'),
    ],
)
def test_loose_takes_another_spelling_of_the_same_object(a, b):
    assert loose_tool_call(said(call(a)), said(call(b)))


@pytest.mark.parametrize(
    ("a", "b"),
    [
        ('{"a": 1}', '{"a": true}'),
        ('{"a": 100000000000000000000000001}', '{"a": 100000000000000000000000002}'),
        ('{"a": [1, 2]}', '{"a": [2, 1]}'),
        ('{"a": 1, "a": 1}', '{"a": 1}'),
        ('{"a": NaN}', '{"a":NaN}'),
        ("[1]", "[1.0]"),
        ("not json", "not  json"),
        ("[" * 5000, "[" * 5001),
    ],
)
def test_loose_refuses_another_object(a, b):
    assert not loose_tool_call(said(call(a)), said(call(b)))


def test_loose_still_compares_the_rest():
    one = said(call())
    assert not loose_tool_call(one, said(call(), call()))
    assert not loose_tool_call(one, said(call(id="c2")))
    assert not loose_tool_call(one, said(call(extra=1)))
    assert not loose_tool_call(one, said(call(), reasoning_content="hm"))
    assert not loose_tool_call(one, said({"id": "c1", "type": "function", "function": {"name": "get"}}))


def test_role_content_only_confuses_different_calls():
    assert role_content_only(said(call()), said(call('{"a": 2}')))
    assert not role_content_only(said(content="a"), {"role": "user", "content": "a"})


_json = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=6,
)


@settings(max_examples=40, deadline=None)
@given(arguments=st.dictionaries(st.text(max_size=3), _json, max_size=4), seed=st.randoms(use_true_random=False))
def test_loose_finds_an_object_in_any_key_order(arguments, seed):
    def shuffled(value: Any) -> Any:
        if isinstance(value, dict):
            items = list(value.items())
            seed.shuffle(items)
            return {k: shuffled(v) for k, v in items}
        return [shuffled(v) for v in value] if isinstance(value, list) else value

    stored = said(call(json.dumps(arguments)))
    replayed = said(call(json.dumps(shuffled(arguments), separators=(",", ":"), ensure_ascii=False)))
    before = json.dumps([stored, replayed])
    assert loose_tool_call(stored, replayed) and role_content_only(stored, replayed)
    assert json.dumps([stored, replayed]) == before  # nothing was changed


def test_a_user_matcher_is_checked():
    register_function("tests.match_yes", lambda a, b: 1)
    register_function("tests.match_boom", lambda a, b: 1 / 0)
    with pytest.raises(MatcherError, match="neither True nor False"):
        resolve_matcher("tests.match_yes")({}, {})
    with pytest.raises(MatcherError, match="ZeroDivisionError"):
        resolve_matcher("tests.match_boom")({}, {})

    async def later(a, b):
        return True

    register_function("tests.match_later", later)
    with pytest.raises(ValueError, match="async"):
        resolve_matcher("tests.match_later")
    with pytest.raises(ValueError, match="use one of strict"):
        resolve_matcher("Strict")
    with pytest.raises(ValueError, match="no module"):
        resolve_matcher("nowhere.to_be.found")
