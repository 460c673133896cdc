"""SFT loss masks: for any template, exactly what the assistant would have sampled is learned."""

from __future__ import annotations

import pytest

from miles.rollout.loss_masks import LossMaskBuilder
from tests.fast.rollout.fakes import CHATML, write_tokenizer

# Templates in the manner of well-known families; each has its own way to be awkward.
DEFAULT_SYSTEM = (
    "{% if messages[0]['role'] != 'system' %}<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n{% endif %}"
    + CHATML
)
THINK_STRIPPING = (  # older turns lose their reasoning, the last one always gets a think block
    "{% set ns = namespace(last=-1) %}{% for m in messages %}{% if m['role'] == 'user' %}{% set ns.last = loop.index0 %}"
    "{% endif %}{% endfor %}{% for m in messages %}<|im_start|>{{ m['role'] }}\n"
    "{% if m['role'] == 'assistant' %}{% set text = m['content'] or '' %}{% set think = m['reasoning_content'] or '' %}"
    "{% if '</think>' in text %}{% set think = text.split('</think>')[0].split('<think>')[-1].strip('\n') %}"
    "{% set text = text.split('</think>')[-1].lstrip('\n') %}{% endif %}"
    "{% if loop.index0 > ns.last %}<think>\n{{ think }}\n</think>\n\n{% endif %}{{ text }}"
    "{% for call in m['tool_calls'] or [] %}\n<tool_call>\n{{ call['function']['name'] }}\n</tool_call>{% endfor %}"
    "{% else %}{{ m['content'] }}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
HEADERS = (  # trims contents, and its header ends in a blank line
    "<|im_start|>{% for m in messages %}<h>{{ m['role'] }}</h>\n\n{{ m['content'] | trim }}<|eot|>{% endfor %}"
    "{% if add_generation_prompt %}<h>assistant</h>\n\n{% endif %}"
)
INST = (  # no assistant header at all; roles must alternate
    "{% for m in messages %}{% if m['role'] == 'system' %}{{ raise_exception('no system role') }}{% endif %}"
    "{% if (m['role'] == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('roles must alternate') }}{% endif %}"
    "{% if m['role'] == 'user' %}[INST] {{ m['content'] }} [/INST]{% else %} {{ m['content'] }}</s>{% endif %}{% endfor %}"
)
OPENED_THINK = (  # the generation prompt opens the reasoning; rendered turns show only the answer
    "{% for m in messages %}{% if m['role'] == 'assistant' %}<|A|>{{ m['content'].split('</think>')[-1] }}<|end|>"
    "{% else %}<|U|>{{ m['content'] }}{% endif %}{% endfor %}{% if add_generation_prompt %}<|A|><think>\n{% endif %}"
)
MANY_ENDS = (  # a turn ends by what follows it, and a tool result must have a call before it
    "{% for m in messages %}{% if m['role'] == 'tool' %}{% if not loop.previtem['tool_calls'] %}"
    "{{ raise_exception('a tool result without a call') }}{% endif %}<|start|>tool<|message|>{{ m['content'] }}<|end|>"
    "{% else %}<|start|>{{ m['role'] }}<|message|>{{ m['content'] }}"
    "{% for call in m['tool_calls'] or [] %}{{ call['function']['name'] }}{{ call['function']['arguments'] | tojson }}"
    "<|call|>{% else %}{{ '<|return|>' if loop.last and m['role'] == 'assistant' else '<|end|>' }}{% endfor %}{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}<|start|>assistant{% endif %}"
)
NO_ENDS = (  # a turn ends where the next one begins: its header is what the model stops on
    "{% for m in messages %}{% if m['role'] == 'tool' %}<|observation|>\n<tool_response>\n{{ m['content'] }}"
    "{% else %}<|{{ m['role'] }}|>\n{{ m['content'] }}{% for call in m['tool_calls'] or [] %}<tool_call>"
    "{{ call['function']['name'] }}{% for k, v in call['function']['arguments'].items() %} {{ k }}: {{ v }}{% endfor %}"
    " </tool_call>{% endfor %}{% endif %}{% endfor %}{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
)
TEMPLATES = {"chatml": CHATML, "default_system": DEFAULT_SYSTEM, "think": THINK_STRIPPING, "headers": HEADERS}
END = {"chatml": "<|im_end|>", "default_system": "<|im_end|>", "think": "<|im_end|>", "headers": "<|eot|>"}


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    from transformers import AutoTokenizer

    loaded = AutoTokenizer.from_pretrained(write_tokenizer(tmp_path_factory.mktemp("m")))
    tags = "im_start eot A U end start message call return user assistant observation"
    loaded.add_special_tokens({"additional_special_tokens": [*(f"<|{tag}|>" for tag in tags.split()), "</s>"]})
    return loaded


def trained(tokenizer, template, messages, mask_type="qwen", **kwargs):
    """The runs of trained tokens, decoded."""
    tokenizer.chat_template = template
    built = LossMaskBuilder(tokenizer, mask_type).build(messages, **kwargs)
    assert len(built.token_ids) == len(built.loss_mask)
    runs, current = [], []
    for token, bit in [*zip(built.token_ids, built.loss_mask, strict=True), (None, 0)]:
        if bit:
            current.append(token)
        elif current:
            runs.append(tokenizer.decode(current))
            current = []
    return runs


def chat(*contents, system=None):
    roles = ["user", "assistant"] * len(contents)
    messages = [{"role": r, "content": c} for r, c in zip(roles, contents, strict=False)]
    return ([{"role": "system", "content": system}] if system else []) + messages


@pytest.mark.parametrize("name", ["chatml", "default_system", "headers"])
@pytest.mark.parametrize("system", [None, "Answer like a pirate. assistant\nuser"])
def test_every_assistant_turn_with_its_end_token_and_nothing_else(tokenizer, name, system):
    messages = chat("hi", "hello there", "and 2+2?", "four, hello there", system=system)
    assert trained(tokenizer, TEMPLATES[name], messages) == [f"hello there{END[name]}", f"four, hello there{END[name]}"]


@pytest.mark.parametrize("name", ["chatml", "default_system", "headers", "think"])
def test_contents_that_look_like_each_other_or_like_the_template(tokenizer, name):
    messages = chat("assistant\nyes", "yes", "yes", "assistant\nyes", "?", "y")
    runs = trained(tokenizer, TEMPLATES[name], messages)
    end = END[name]
    think = "<think>\n\n</think>\n\n" if name == "think" else ""
    assert runs == [f"yes{end}", f"assistant\nyes{end}", f"{think}y{end}"]


def test_a_template_without_headers_or_system_role(tokenizer):
    assert trained(tokenizer, INST, chat("a", "one", "b", "two")) == [" one</s>", " two</s>"]


def test_older_reasoning_is_gone_and_the_last_one_is_learned(tokenizer):
    messages = chat("a", "<think>\nwhy\n</think>\n\none", "b", "<think>\nbecause\n</think>\n\ntwo")
    assert trained(tokenizer, THINK_STRIPPING, messages, "qwen3") == [
        "one<|im_end|>",
        "<think>\nbecause\n</think>\n\ntwo<|im_end|>",
    ]


def test_the_empty_think_block_of_a_plain_answer_is_learned_as_rendered(tokenizer):
    assert trained(tokenizer, THINK_STRIPPING, chat("a", "one")) == ["<think>\n\n</think>\n\none<|im_end|>"]


def test_reasoning_content_is_learned_or_its_loss_is_an_error(tokenizer):
    messages = chat("a", "one")
    messages[-1]["reasoning_content"] = "because of x"
    assert trained(tokenizer, THINK_STRIPPING, messages) == ["<think>\nbecause of x\n</think>\n\none<|im_end|>"]
    with pytest.raises(ValueError, match="drops reasoning_content of message 1"):
        trained(tokenizer, CHATML, messages)


def test_tool_calls_and_tool_results(tokenizer):
    call = {"type": "function", "function": {"name": "add", "arguments": {}}}
    messages = [
        {"role": "user", "content": "2+2"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "4"},
        {"role": "assistant", "content": "four"},
    ]
    runs = trained(tokenizer, THINK_STRIPPING, messages)
    assert runs == [
        "<think>\n\n</think>\n\n<tool_call>\nadd\n</tool_call><|im_end|>",
        "<think>\n\n</think>\n\nfour<|im_end|>",
    ]


def test_turns_that_end_in_different_ways(tokenizer):
    call = {"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
    messages = [
        *chat("hi", "hello", "2+2"),
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "4"},
        {"role": "assistant", "content": "four"},
    ]
    assert trained(tokenizer, MANY_ENDS, messages) == [
        "<|message|>hello<|end|>",
        '<|message|>add{"a": 1}<|call|>',
        "<|message|>four<|return|>",
    ]
    assert trained(tokenizer, NO_ENDS, messages) == [
        "hello<|user|>",
        "<tool_call>add a: 1 </tool_call><|observation|>",
        "four",
    ]


def test_a_turn_can_be_left_out(tokenizer):
    messages = chat("a", "one", "b", "two")
    messages[1]["step_loss_mask"] = 0
    assert trained(tokenizer, CHATML, messages) == ["two<|im_end|>"]


def test_the_conversation_may_end_with_the_user(tokenizer):
    assert trained(tokenizer, CHATML, chat("a", "one", "b")) == ["one<|im_end|>"]


def test_distill_qwen_learns_the_last_turn_word_for_word(tokenizer):
    messages = chat("a", "<think>\nwhy\n</think>\n\none")
    assert trained(tokenizer, OPENED_THINK, messages) == ["\n\none<|end|>"], "the template hides the reasoning"
    assert trained(tokenizer, OPENED_THINK, messages, "distill_qwen") == ["why\n</think>\n\none<|im_end|>"]


def test_what_cannot_be_learned_is_said(tokenizer):
    with pytest.raises(ValueError, match="no assistant message"):
        trained(tokenizer, CHATML, chat("a"))
    with pytest.raises(ValueError, match="--loss-mask-type llama: use one of qwen, qwen3, distill_qwen"):
        LossMaskBuilder(tokenizer, "llama")
    drops = "{% for m in messages %}{{ m['role'] }}{% endfor %}"
    with pytest.raises(ValueError, match="does not render the content of assistant message 1: 'one'"):
        trained(tokenizer, drops, chat("a", "one"))
    with pytest.raises(ValueError, match="the chat template refused the conversation"):
        trained(tokenizer, INST, chat("a", "one", system="s"))
    with pytest.raises(ValueError, match="no chat template: pass --chat-template-path"):
        trained(tokenizer, None, chat("a", "one"))
