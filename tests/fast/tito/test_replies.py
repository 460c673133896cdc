"""Replies of each family as messages, whole and while they grow."""

from __future__ import annotations

import json

import pytest

from miles.rollout.tito.replies import ReplyParser

SPECS = [
    {
        "type": "function",
        "function": {
            "name": "get",
            "parameters": {"properties": {"city": {"type": "string"}, "days": {"type": "integer"}}},
        },
    }
]
WANT = {"city": "7", "days": 3}
_D = "｜DSML｜"
_ARGS = json.dumps(WANT)
CALLS = {
    "hermes": f'<tool_call>\n{{"name": "get", "arguments": {_ARGS}}}\n</tool_call>',
    "qwen3_coder": "<tool_call>\n<function=get>\n<parameter=city>\n7\n</parameter>\n<parameter=days>\n3\n</parameter>\n</function>\n</tool_call>",
    "glm47": "<tool_call>get<arg_key>city</arg_key><arg_value>7</arg_value><arg_key>days</arg_key><arg_value>3</arg_value></tool_call>",
    "minimax_m2": '<minimax:tool_call>\n<invoke name="get"><parameter name="city">7</parameter>\n<parameter name="days">3</parameter>\n</invoke>\n</minimax:tool_call>',
    "dsml": f'<{_D}function_calls>\n<{_D}invoke name="get">\n<{_D}parameter name="city" string="true">7</{_D}parameter>\n'
    f'<{_D}parameter name="days" string="false">3</{_D}parameter>\n</{_D}invoke>\n</{_D}function_calls>',
    "kimi_k2": f"<|tool_calls_section_begin|><|tool_call_begin|>functions.get:0<|tool_call_argument_begin|>{_ARGS}<|tool_call_end|><|tool_calls_section_end|>",
}
HARMONY = (
    "<|channel|>analysis<|message|>Let me look.<|end|><|start|>assistant<|channel|>commentary to=functions.get "
    f"<|constrain|>json<|message|>{_ARGS}"
)


@pytest.mark.parametrize("form", CALLS)
def test_reasoning_words_and_calls(form):
    parser = ReplyParser("think", form, specs=SPECS)
    reply = parser.parse(f"<think>\nLet me look.\n</think>\n\nOne moment.\n{CALLS[form]}")
    assert (reply.reasoning, reply.content) == ("Let me look.", "One moment.")
    assert [(call.name, json.loads(call.arguments)) for call in reply.calls] == [("get", WANT)]


def test_harmony_channels():
    reply = ReplyParser("harmony", "harmony", specs=SPECS).parse(HARMONY)
    assert (reply.reasoning, reply.content) == ("Let me look.", "")
    assert [(call.name, json.loads(call.arguments)) for call in reply.calls] == [("get", WANT)]
    said = ReplyParser("harmony", "harmony").parse("<|channel|>final<|message|>Four.")
    assert said.content == "Four." and said.reasoning is None


def test_two_calls_and_nothing_without_tools():
    text = CALLS["hermes"] + "\n" + CALLS["hermes"]
    assert len(ReplyParser(None, "hermes", specs=SPECS).parse(text).calls) == 2
    assert ReplyParser(None, "hermes").parse(text).content == text


def test_reasoning_that_the_prompt_opened():
    parser = ReplyParser("think", None, opened=True)
    assert parser.parse("hm</think>yes").reasoning == "hm"
    assert parser.parse("hm</think>yes").content == "yes"
    cut = parser.parse("still thinking")
    assert cut.reasoning == "still thinking" and cut.content == ""


def test_arguments_that_are_no_json_reach_the_agent_as_written():
    reply = ReplyParser(None, "hermes", specs=SPECS).parse(
        '<tool_call>{"name": "get", "arguments": {"city": }</tool_call>'
    )
    [call] = reply.calls
    assert call.name == "get" and call.arguments.startswith('{"city": }')
    words = "I would <tool_call> if I could"
    assert ReplyParser(None, "hermes", specs=SPECS).parse(words).content == words


@pytest.mark.parametrize("form", [*CALLS, "harmony"])
def test_a_growing_reply_never_takes_anything_back(form):
    if form == "harmony":
        parser, text = ReplyParser("harmony", "harmony", specs=SPECS), HARMONY + "<|call|>"
    else:
        parser = ReplyParser("think", form, specs=SPECS)
        text = f"<think>\nLet me <look>.\n</think>\n\nOne < moment.\n\n{CALLS[form]}"
    whole = parser.parse(text)
    calls = 0
    for end in range(len(text) + 1):
        part = parser.parse(text[:end], final=False)
        assert whole.content.startswith(part.content), text[:end]
        assert (whole.reasoning or "").startswith(part.reasoning or ""), text[:end]
        assert part.calls == whole.calls[: len(part.calls)], text[:end]
        calls = max(calls, len(part.calls))
    assert calls == len(whole.calls) == 1
