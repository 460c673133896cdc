"""Tool calling over several turns: ids stay, environment tokens carry no loss, bad calls are answered."""

from __future__ import annotations

import pytest

from miles.rollout.base_types import GenerateFnInput
from miles.rollout.generate_hub.engine_call import GenerationError
from miles.rollout.generate_hub.multi_turn import generate
from miles.rollout.generate_state import GenerateState
from miles.rollout.generate_utils.chat_delta import tool_messages, turn_delta
from miles.rollout.generate_utils.tool_calls import (
    ToolCall,
    parse_hermes,
    parse_llama3,
    parse_mistral,
    tool_call_parser,
)
from miles.rollout.prompts import load_tokenizer
from miles.utils.imports import register_function
from miles.utils.types import Sample, SampleStatus
from tests.fast.rollout.fakes import answer, make_args, write_tokenizer


class Script:
    """An engine that says these texts, one a turn, each ended by the end-of-turn token unless cut."""

    def __init__(self, tokenizer, *texts, reason=None):
        self.tokenizer, self.texts, self.reason = tokenizer, list(texts), reason
        self.payloads = []

    async def generate(self, payload, routing_key=None):
        self.payloads.append(payload)
        text = self.texts.pop(0)
        ids = self.tokenizer(text)["input_ids"]
        last = self.reason if self.reason and not self.texts else {"type": "stop", "matched": 1}
        if last["type"] == "stop":
            ids = [*ids, self.tokenizer.eos_token_id]
        return answer(ids, len(payload["input_ids"]), last)


CALL = '<tool_call>{"name": "add", "arguments": {"a": 2, "b": 2}}</tool_call>'


async def add(name, params):
    return str(params["a"] + params["b"])


async def run(model_dir, *texts, tool=add, reason=None, prompt="2+2?", **overrides):
    register_function("test.tool", tool)
    fields = {
        "generate_max_turns": 4,
        "generate_tool_specs_path": None,
        "generate_tool_call_parser": "qwen25",
        "generate_execute_tool_function_path": "test.tool",
        "rollout_max_response_len": 400,
    }
    args = make_args(model_dir, **{**fields, **overrides})
    pool = Script(load_tokenizer(args), *texts, reason=reason)
    state = GenerateState(args, pool)
    sample = Sample(index=0, prompt=[{"role": "user", "content": prompt}])
    sample = (await generate(GenerateFnInput(state, sample, state.sampling_params))).samples
    return sample, pool


def parts(sample, tokenizer):
    """Response text as runs of (trained, text)."""
    runs = []
    for token, bit in zip(sample.tokens[-sample.response_length :], sample.loss_mask, strict=True):
        if not runs or runs[-1][0] != bit:
            runs.append((bit, []))
        runs[-1][1].append(token)
    return [(bit, tokenizer.decode(ids)) for bit, ids in runs]


async def test_tool_results_are_appended_and_not_trained(model_dir):
    sample, pool = await run(model_dir, CALL, "four")
    sample.validate()
    assert parts(sample, pool.tokenizer) == [
        (1, CALL + "<|im_end|>"),
        (0, "\n<|im_start|>tool\n4<|im_end|>\n<|im_start|>assistant\n"),
        (1, "four<|im_end|>"),
    ]
    assert {p for p, bit in zip(sample.rollout_log_probs, sample.loss_mask, strict=True) if not bit} == {0.0}
    assert sample.status is SampleStatus.COMPLETED
    assert sample.non_generation_time > 0
    assert pool.payloads[1]["input_ids"] == sample.tokens[: len(pool.payloads[1]["input_ids"])]


async def test_bad_calls_are_told_to_the_model_and_never_executed(model_dir):
    def executor(name, params):
        raise AssertionError("must not run")

    bad = ['{"a":', "[1]", "3", "", '{"name": "add", "arguments": [1]}', '{"name": "add", "arguments": "{oops"}']
    for body in bad:
        sample, pool = await run(model_dir, f"<tool_call>{body}</tool_call>", "sorry", tool=executor)
        assert "tool\nError: " in parts(sample, pool.tokenizer)[1][1], body
        assert sample.status is SampleStatus.COMPLETED


async def test_several_calls_are_answered_in_order(model_dir):
    sample, pool = await run(model_dir, CALL + CALL.replace('"b": 2', '"b": 5'), "done")
    assert parts(sample, pool.tokenizer)[1][1].count("<|im_start|>tool") == 2
    assert parts(sample, pool.tokenizer)[1][1].index("4") < parts(sample, pool.tokenizer)[1][1].index("7")


async def test_limits_end_a_sample_as_truncated(model_dir):
    sample, pool = await run(model_dir, CALL, CALL, generate_max_turns=2)
    assert (sample.status, len(pool.payloads)) == (SampleStatus.TRUNCATED, 2)
    assert sample.loss_mask[-1] == 1, "no answer is appended that nobody reads"
    sample, pool = await run(model_dir, CALL, rollout_max_response_len=len(CALL) + 10)
    assert (sample.status, len(pool.payloads)) == (SampleStatus.TRUNCATED, 1)
    sample, _ = await run(model_dir, "long", reason={"type": "length", "length": 4})
    assert sample.status is SampleStatus.TRUNCATED


async def test_a_tool_that_raises_fails_the_sample(model_dir):
    def broken(name, params):
        raise OSError("sandbox gone")

    with pytest.raises(GenerationError, match="tool 'add' raised OSError: sandbox gone") as error:
        await run(model_dir, CALL, "x", tool=broken)
    assert error.value.category == "tool_error"
    with pytest.raises(GenerationError, match="--generate-execute-tool-function-path"):
        await run(model_dir, CALL, "x", generate_execute_tool_function_path=None)


def test_an_end_of_turn_that_was_not_sampled_is_written_once(model_dir):
    tokenizer = load_tokenizer(make_args(model_dir))
    end = tokenizer.eos_token_id
    said, results = tool_messages([ToolCall("add", {"a": 1})], ["4"])
    ids = tokenizer("hi")["input_ids"]
    with_end = turn_delta(tokenizer, [*ids, end], said, results)
    without = turn_delta(tokenizer, ids, said, results)
    assert without == [end, *with_end]
    assert tokenizer.decode(with_end) == "\n<|im_start|>tool\n4<|im_end|>\n<|im_start|>assistant\n"


@pytest.mark.parametrize("name", ["CHATML", "THINK_STRIPPING", "MANY_ENDS", "NO_ENDS"])
def test_the_next_prompt_is_what_the_template_would_write(tmp_path, name):
    """Sampled turn plus delta equals the conversation rendered as a whole, for templates that end turns differently."""
    import tests.fast.rollout.test_loss_masks as templates
    from miles.rollout.chat_turns import ChatTurns

    tokenizer = load_tokenizer(make_args(write_tokenizer(tmp_path)))
    tags = "im_start eot start end message call return user assistant observation"
    tokenizer.add_special_tokens({"additional_special_tokens": [f"<|{tag}|>" for tag in tags.split()]})
    tokenizer.chat_template = getattr(templates, name)
    said, results = tool_messages([ToolCall("add", {"a": 1})], ["the answer is 4"])
    conversation = [{"role": "user", "content": "1+3?"}, said, *results]
    whole, turns = ChatTurns(tokenizer).find(conversation, generation_prompt=True)
    prompt, sampled = (
        tokenizer(t)["input_ids"] for t in (whole[: turns[0].start], whole[turns[0].start : turns[0].end])
    )
    assert tokenizer.decode(prompt) == ChatTurns(tokenizer).render(conversation[:1], None, generation_prompt=True)
    assert tokenizer.decode(prompt + sampled + turn_delta(tokenizer, sampled, said, results)) == whole


def test_a_template_that_leaves_tool_results_out_is_refused(model_dir):
    tokenizer = load_tokenizer(make_args(model_dir))
    tokenizer.chat_template = (
        "{% for m in messages if m['role'] != 'tool' %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}"
    )
    said, results = tool_messages([ToolCall("add", {})], ["42"])
    with pytest.raises(ValueError, match="does not render the message '42'"):
        turn_delta(tokenizer, [1], said, results)


def test_its_flags_are_flags_of_the_command_line():
    from miles.arguments import make_args as real_args

    given = {"generate_max_turns": 3, "generate_tool_call_parser": "llama3"}
    args = real_args(check=False, **given)
    assert (args.generate_max_turns, args.generate_tool_call_parser) == (3, "llama3")
    assert args.generate_execute_tool_function_path is None


def test_parsers():
    assert [c.arguments for c in parse_hermes(CALL + " and " + CALL)] == [{"a": 2, "b": 2}] * 2
    assert parse_hermes("<think><tool_call>{}</tool_call></think>no call") == []
    assert parse_hermes('<tool_call>{"name": "f", "arguments": {}}')[0].name == "f"
    assert parse_mistral('[TOOL_CALLS][{"name": "f", "arguments": {"x": 1}}]</s>')[0].arguments == {"x": 1}
    assert parse_mistral("[TOOL_CALLS][{")[0].error
    assert parse_llama3('<|python_tag|>{"name": "f", "parameters": {"x": 1}}<|eom_id|>')[0].arguments == {"x": 1}
    assert parse_llama3("the name of {x}") == []
    with pytest.raises(ValueError, match="--generate-tool-call-parser nope: use one of hermes"):
        tool_call_parser("nope")
