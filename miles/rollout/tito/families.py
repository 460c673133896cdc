"""What is particular to a model family. Everything else about a template is asked of the template itself.

A family names the tokens that end a turn, the template's switches and places that make it append-only, and the parsers of what
its models write. `TitoTokenizer` probes the real template at startup, so a wrong row here is refused, not believed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

ALL_ROLES = ("tool", "user", "system", "assistant")
_NO_SYSTEM = ("tool", "user", "assistant")


@dataclass(frozen=True)
class Family:
    """One value of `--tito-model`.

    Attributes:
        stops: tokens that end a sampled turn. Where the template goes on with another token than the sampled one (an opener
            of a tool message where a user follows, `<|return|>` where history has `<|end|>`), the sampled one is dropped.
        closes: further tokens with which the template ends an assistant message.
        append_roles: roles of messages that may follow an assistant's; the probe must confirm each.
        edits: places of the native template, and what they become, so that an old turn is rendered as a new one was.
        pinned: template arguments that nobody may change.
        assistant_start: how an assistant's message begins, for the diagnostic.
        boundaries: tokens that part messages in the diagnostic; the tokenizer's special tokens where None.
        not_boundaries: special tokens that stand inside of messages.
        trailing: texts that a conversation may or may not end with.
        reasoning, tools: parsers by name; None leaves the text as it is.
        reasoning_key: the name by which the template knows the reasoning of a message.
    """

    name: str
    stops: tuple[str, ...] = ()
    closes: tuple[str, ...] = ()
    append_roles: tuple[str, ...] = ALL_ROLES
    edits: tuple[tuple[str, str], ...] = ()
    pinned: Mapping[str, Any] = field(default_factory=dict)
    assistant_start: str | None = None
    boundaries: tuple[str, ...] | None = None
    not_boundaries: tuple[str, ...] = ()
    trailing: tuple[str, ...] = ("\n",)
    reasoning: str | None = None
    tools: str | None = None
    reasoning_key: str = "reasoning_content"


# Reasoning stays in the history: the template's condition "only after the last question" becomes "always".
_QWEN_KEEP = (
    ("{%- if loop.index0 > ns.last_query_index %}", "{%- if true %}"),
    ("{%- if loop.last or (not loop.last and reasoning_content) %}", "{%- if true %}"),
)
_CHATML: dict[str, Any] = {"stops": ("<|im_end|>", "<|endoftext|>"), "assistant_start": "<|im_start|>assistant"}
_QWEN: dict[str, Any] = _CHATML | {"edits": _QWEN_KEEP, "pinned": {"clear_thinking": False}, "reasoning": "think"}
_GLM: dict[str, Any] = {
    "stops": ("<|user|>", "<|observation|>", "<|endoftext|>"),
    "pinned": {"clear_thinking": False},
    "assistant_start": "<|assistant|>",
    "trailing": ("<|user|>", "<|observation|>", "<|endoftext|>"),
    "reasoning": "think",
    "tools": "glm47",
}
_KIMI: dict[str, Any] = {
    "stops": ("<|im_end|>",),
    "pinned": {"preserve_thinking": True},
    "edits": (
        ("messages[:ns.last_non_tool_call_assistant_msg+1]", "messages[:0]"),
        ("messages[ns.last_non_tool_call_assistant_msg+1:]", "messages"),
    ),
    "assistant_start": "<|im_assistant|>",
    "not_boundaries": ("<|im_middle|>",),
    "trailing": (),
    "reasoning": "think",
    "tools": "kimi_k2",
}
_DEEPSEEK: dict[str, Any] = {
    "stops": ("<｜end▁of▁sentence｜>",),
    "pinned": {"drop_thinking": False},
    "assistant_start": "<｜Assistant｜>",
    "boundaries": ("<｜User｜>", "<｜Assistant｜>"),
    "trailing": ("<｜Assistant｜>", "<think>", "</think>"),
    "reasoning": "think",
    "tools": "dsml",
}

FAMILIES: Mapping[str, Family] = MappingProxyType(
    {
        family.name: family
        for family in (
            Family("default"),
            Family("qwen3", **_QWEN, tools="hermes"),
            Family("qwen35", **_QWEN, append_roles=_NO_SYSTEM, tools="qwen3_coder"),
            Family("qwennext", **_QWEN, tools="hermes"),
            Family("qwen25", **_CHATML, tools="hermes"),
            Family("smollm2", **_CHATML, tools="hermes"),
            Family("glm47", **_GLM),
            Family("glm5", **_GLM),
            Family(
                "nemotron3",
                **_CHATML,
                pinned={"truncate_history_thinking": False},
                reasoning="think",
                tools="qwen3_coder",
            ),
            Family("kimi25", **_KIMI),
            Family("kimi26", **_KIMI),
            Family(
                "minimax",
                stops=("[e~[",),
                append_roles=_NO_SYSTEM,
                edits=((" and loop.index0 > ns.last_user_index -%}", " -%}"),),
                pinned={"clear_thinking": False},
                assistant_start="]~b]ai",
                reasoning="think",
                tools="minimax_m2",
            ),
            Family(
                "deepseekv32",
                **_DEEPSEEK,
                append_roles=("tool", "user"),
                edits=(("is_after_last_user and thinking", "thinking"),),
            ),
            Family("deepseekv4", **_DEEPSEEK, append_roles=("tool", "user")),
            Family(
                "gptoss",
                stops=("<|return|>", "<|call|>"),
                closes=("<|end|>",),
                append_roles=("tool", "user"),
                edits=(
                    (" and not future_final_message.found", ""),
                    ("{%- elif loop.last and not add_generation_prompt %}", "{%- elif true %}"),
                    ('message.content + "<|return|>"', 'message.content + "<|end|>"'),
                ),
                assistant_start="<|start|>assistant",
                not_boundaries=("<|message|>", "<|channel|>", "<|constrain|>"),
                trailing=("<|return|>", "<|end|>", "<|call|>"),
                reasoning="harmony",
                tools="harmony",
                reasoning_key="thinking",
            ),
        )
    }
)

# Names of public launch commands for the same rules.
ALIASES = {"minimax_m25": "minimax", "minimax_m27": "minimax"}


def family_of(name: str) -> Family:
    """The family of `--tito-model`. Raises: ValueError that lists the known ones."""
    try:
        return FAMILIES[ALIASES.get(name, name)]
    except KeyError:
        raise ValueError(f"--tito-model {name}: use one of {', '.join(FAMILIES)}") from None
