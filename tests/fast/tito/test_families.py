"""Every family on its model's real chat template: a conversation grows by appending, token for token."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from miles.rollout.tito.boundary import TitoTokenizer
from miles.rollout.tito.families import FAMILIES, family_of
from miles.rollout.tito.mismatch import HARD, MismatchComparator
from miles.rollout.tito.probe import cases
from miles.rollout.tito.template import MessageError
from tests.helpers.chat_families import FAMILY_TEMPLATES, make_family_tokenizer

_PAIRS = [(family, name) for family, names in FAMILY_TEMPLATES.items() for name in names]
_built: dict[tuple, TitoTokenizer] = {}


def tito(family: str, template: str | None = None, **kwargs: Any) -> TitoTokenizer:
    key = (family, template, *kwargs.items())
    if key not in _built:
        name = template or FAMILY_TEMPLATES[family][0]
        _built[key] = TitoTokenizer(make_family_tokenizer(name), FAMILIES[family], kwargs)
    return _built[key]


def id_of(t: TitoTokenizer, token: str) -> int:
    return t.encoder.special_ids[token]


@pytest.mark.parametrize(("family", "template"), _PAIRS)
def test_the_promised_roles_can_be_appended(family, template):
    assert set(tito(family, template).append_roles) == set(FAMILIES[family].append_roles)


@pytest.mark.parametrize(("family", "template"), _PAIRS)
def test_row_and_suffix_are_the_whole_conversation(family, template):
    """For a model that writes exactly what the template would, the joined tokens are those of one rendering."""
    t = tito(family, template)
    seen = 0
    for case in cases():
        if case.role not in t.append_roles:
            continue
        try:
            before = t.template.render(case.history, case.tools, generation_prompt=False)
            whole = t.encoder.encode(
                t.template.render([*case.history, *case.messages], case.tools, generation_prompt=True)
            )
        except MessageError:
            continue  # the template has no such conversation
        close = t.close_of(before)
        row = t.encoder.encode(before[: len(before) - len(close)])
        stops = [close.strip()] if close else [s for s in FAMILIES[family].stops if s in t.encoder.special_ids]
        for stop in [
            *stops,
            "",
        ]:  # each way in which the turn may have ended; "": a stop string, nothing to see in the row
            ended = [*row, *([id_of(t, stop)] if stop else [])]
            suffix = t.suffix(ended[-1], case.history[-1], case.messages, case.tools)
            assert ended[: len(ended) - suffix.drop] + suffix.ids == whole, (case.name, stop)
            seen += 1
    assert seen >= 8


def test_qwen_gets_the_newline_that_the_model_does_not_sample():
    t = tito("qwen3")
    last = {"role": "assistant", "content": "Four."}
    suffix = t.suffix(id_of(t, "<|im_end|>"), last, [{"role": "user", "content": "Why?"}])
    assert suffix.drop == 0
    assert t.encoder.decode(suffix.ids) == "\n<|im_start|>user\nWhy?<|im_end|>\n<|im_start|>assistant\n"


def test_a_stop_token_that_opens_the_next_message_is_kept_once():
    t = tito("glm47")
    called = {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"id": "c", "type": "function", "function": {"name": "get", "arguments": "{}"}}],
    }
    suffix = t.suffix(id_of(t, "<|observation|>"), called, [{"role": "tool", "content": "42", "tool_call_id": "c"}])
    assert suffix.drop == 0 and id_of(t, "<|observation|>") not in suffix.ids


@pytest.mark.parametrize("stop", ["<|observation|>", "<|endoftext|>"])
def test_a_stop_token_that_opens_nothing_is_dropped(stop):
    t = tito("glm47")
    suffix = t.suffix(id_of(t, stop), {"role": "assistant", "content": "x"}, [{"role": "user", "content": "y"}])
    assert suffix.drop == 1 and suffix.ids[0] == id_of(t, "<|user|>")


def test_return_becomes_end_in_the_history_of_gpt_oss():
    t = tito("gptoss")
    suffix = t.suffix(id_of(t, "<|return|>"), {"role": "assistant", "content": "x"}, [{"role": "user", "content": "y"}])
    assert suffix.drop == 1 and suffix.ids[0] == id_of(t, "<|end|>")


def test_a_role_that_the_template_cannot_append_is_refused_by_name():
    with pytest.raises(MessageError, match=r"a system message cannot be appended .* qwen35"):
        tito("qwen35").suffix(None, {"role": "assistant", "content": ""}, [{"role": "system", "content": "x"}])


def test_default_finds_out_what_a_template_allows():
    assert set(tito("default", "Qwen-Qwen2.5-7B-Instruct").append_roles) == {"tool", "user", "system", "assistant"}
    assert tito("default", "GLM-4.7-Flash").append_roles == ("tool",)
    with pytest.raises(ValueError, match=r"nothing can be appended.*--tito-model"):
        TitoTokenizer(make_family_tokenizer("Qwen-Qwen3-0.6B"), FAMILIES["default"])


def test_a_checkpoint_of_another_family_is_refused_at_startup():
    with pytest.raises(ValueError, match="has none of"):
        TitoTokenizer(make_family_tokenizer("moonshotai-Kimi-K2"), FAMILIES["minimax"])
    native = make_family_tokenizer("Qwen-Qwen3-0.6B")
    with pytest.raises(ValueError, match=r"not the one that the family expects.*differently"):
        TitoTokenizer(native, FAMILIES["qwen25"])  # lacks the edits that Qwen3 needs


def test_pinned_template_arguments_cannot_be_changed():
    with pytest.raises(MessageError, match="clear_thinking"):
        TitoTokenizer(make_family_tokenizer("Qwen-Qwen3-0.6B"), FAMILIES["qwen3"], {"clear_thinking": True})
    with pytest.raises(ValueError, match="use one of"):
        family_of("qwen9")


# ---- text that spells special tokens -------------------------------------------------------------------------------


@pytest.mark.parametrize(("family", "template"), _PAIRS)
def test_special_tokens_in_tool_and_user_text_stay_text(family, template):
    """No content of a tool or a user changes the number of any special token, in the first prompt or in a suffix."""
    t = tito(family, template)
    tokens = set(t.encoder.special_ids.values())
    evil = " ".join(t.encoder.special_ids)
    role = "tool" if "tool" in t.append_roles else "user"
    last = {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"id": "c0", "type": "function", "function": {"name": "get", "arguments": "{}"}}],
    }

    def counts(ids: list[int]) -> list[int]:
        return [i for i in ids if i in tokens]

    def first(content: str) -> list[int]:
        return t.prompt_ids([{"role": "user", "content": content}])

    def later(content: str) -> list[int]:
        return t.suffix(None, last, [{"role": role, "content": content, "tool_call_id": "c0", "name": "get"}]).ids

    for build in (first, later):
        assert counts(build(evil)) == counts(build("harmless"))
        plain = t.encoder.decode(build(evil))
        assert evil in plain or t.family.name == "gptoss"  # which writes tool results as JSON


def test_shielding_is_undone_for_any_text():
    t = tito("qwen3")
    for text in ("", "\U000f0000\U000f0001 <|im_end|>", "<|im_start|><|im_end|><|im_end|>", "a\U000f0003b"):
        shielded = t.encoder.shield(text)
        assert t.encoder.unshield(shielded) == text
        assert t.encoder.decode(t.encoder.encode(shielded)) == text
        assert not set(t.encoder.encode(shielded)) & set(t.encoder.special_ids.values())


def test_the_model_own_words_keep_their_think_tags():
    t = tito("qwen3")
    ids = t.prompt_ids(
        [{"role": "system", "content": "Use <think>, never <|im_end|>."}, {"role": "user", "content": "x"}]
    )
    assert id_of(t, "<think>") in ids
    assert ids.count(id_of(t, "<|im_end|>")) == 2  # those of the template


# ---- the diagnostic --------------------------------------------------------------------------------------------------


def _conversation(t: TitoTokenizer, turns: int) -> tuple[list[int], list[dict], set[int]]:
    """A row that grows as in a session, with a model that writes as the template does."""
    messages: list[dict] = [{"role": "user", "content": "q0"}]
    row, sampled = t.prompt_ids(messages), set()
    for i in range(turns):
        said = {"role": "assistant", "content": f"a{i}"}
        before = t.template.render([*messages, said], generation_prompt=False)
        close = t.close_of(before)
        answer = t.encoder.encode(before[: len(before) - len(close)])[len(row) :]
        sampled.add(len(messages))
        messages.append(said)
        row = row + answer + (t.encoder.encode(close.strip()) if close else [])
        if i + 1 < turns:
            ask = {"role": "user", "content": f"q{i + 1}"}
            suffix = t.suffix(row[-1], said, [ask])
            messages.append(ask)
            row = row[: len(row) - suffix.drop] + suffix.ids
    return row, messages, sampled


_OPENS_THINKING = {"qwen35", "glm47", "glm5", "nemotron3", "minimax", "deepseekv32"}


@pytest.mark.parametrize("family", [f for f in FAMILY_TEMPLATES if f not in _OPENS_THINKING])
def test_a_clean_session_has_no_mismatch(family):
    t = tito(family)
    row, messages, sampled = _conversation(t, 3)
    assert MismatchComparator(t).compare(row, messages, sampled=sampled)[0] == []


def _kinds(entries: list[dict]) -> list[str]:
    return [entry["type"] for entry in entries]


def test_each_class_of_difference():
    t = tito("qwen25")
    compare = MismatchComparator(t).compare
    row, messages, _ = _conversation(t, 2)
    end, start = id_of(t, "<|im_end|>"), id_of(t, "<|im_start|>")
    spoken = t.encoder.encode("a0")
    at = next(i for i in range(len(row)) if row[i : i + len(spoken)] == spoken)
    assert _kinds(compare([*row[:at], *t.encoder.encode("other"), *row[at + 2 :]], messages)[0]) == ["assistant_text"]
    asked = t.encoder.encode("q1")
    at = next(i for i in range(len(row)) if row[i : i + len(asked)] == asked)
    assert _kinds(compare([*row[:at], *t.encoder.encode("other"), *row[at + 2 :]], messages)[0]) == [
        "non_assistant_text"
    ]
    first = row.index(start)
    assert _kinds(compare([*row[:first], end, *row[first + 1 :]], messages)[0])[0] == "special_token_type"
    dropped = [*row[:first], *row[first + 1 :]]
    [entry] = compare(dropped, messages)[0]
    assert entry["type"] == "special_token_count" and entry["segment_index"] == -1
    newline = t.encoder.encode("\n")[0]
    assert compare([*row, newline], messages)[0] == []  # only at the very end
    seam = next(i for i in range(len(row)) if row[i] == end and row[i + 1] == newline)
    assert _kinds(compare([*row[: seam + 1], *row[seam + 2 :]], messages)[0])[0] in HARD


@pytest.mark.parametrize("family", ["qwen25", "glm47", "gptoss"])
def test_comparing_in_steps_finds_what_comparing_at_once_finds(family, monkeypatch):
    t = tito(family)
    row, messages, sampled = _conversation(t, 6)
    target = t.encoder.encode("a3")
    at = next(i for i in range(len(row)) if row[i : i + len(target)] == target)
    row[at] = t.encoder.encode("z")[0]
    comparator = MismatchComparator(t)
    whole, _ = comparator.compare(row, messages, sampled=sampled)
    checkpoint = None
    encoded = []
    native = t.encoder.encode
    monkeypatch.setattr(t.encoder, "encode", lambda text: encoded.append(len(text)) or native(text))
    for turns in itertools.count(1):
        part, said, _ = _conversation(t, turns)
        if turns > 3:
            part[at] = row[at]
        encoded.clear()
        found, checkpoint = comparator.compare(part, said, sampled=sampled, resume=checkpoint)
        if turns == 6:
            break
    assert found == whole and any(e["type"] == "assistant_text" for e in found)
    assert encoded[0] < 160  # the last step reads the last turn, not the conversation


def test_how_the_last_turn_ended_is_not_compared():
    """Cut off at its limit, at a stop string, or with the other stop token: neither template nor seam is to blame."""
    t = tito("qwen25")
    row, messages, sampled = _conversation(t, 2)
    compare = MismatchComparator(t).compare
    for ended in (row[:-1], [*row[:-1], id_of(t, "<|endoftext|>")], row):
        assert compare(ended, messages, sampled=sampled)[0] == []


def test_sampled_special_tokens_are_the_model_own():
    t = tito("qwen25")
    messages = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a<|im_start|>b"}]
    row = t.prompt_ids(messages[:1]) + t.encoder.encode("a<|im_start|>b<|im_end|>")
    assert MismatchComparator(t).compare(row, messages, sampled={1})[0] == []
