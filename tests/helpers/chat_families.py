"""Real chat templates of model families, with a byte-level tokenizer that has their real special tokens.

The seams between messages depend on special tokens and newlines only, so a small vocabulary shows them as a large one does.
The templates are the model makers' own; `scripts/fetch_chat_templates.py` brings them to `build/chat_templates`.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

TEMPLATES = Path(__file__).parents[2] / "build" / "chat_templates"

_CHATML = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
_SPEECH = ("<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")
_GLM = ("<|endoftext|>", "[gMASK]", "<sop>", "<|system|>", "<|user|>", "<|assistant|>", "<|observation|>")
_KIMI = (
    "[EOS]", "<|im_end|>", "<|im_user|>", "<|im_assistant|>", "<|im_system|>", "<|im_middle|>",
    "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>", "<|tool_call_begin|>", "<|tool_call_argument_begin|>",
    "<|tool_call_end|>",
)  # fmt: skip
_MINIMAX = ("]!p~[", "[e~[", "]~b]", "]~!b[")
_DEEPSEEK = ("<｜end▁of▁sentence｜>", "<｜begin▁of▁sentence｜>")
_DEEPSEEK_SPEECH = ("<｜User｜>", "<｜Assistant｜>", "<think>", "</think>", "｜DSML｜")
_HARMONY = (
    "<|endoftext|>", "<|return|>", "<|constrain|>", "<|channel|>", "<|start|>", "<|end|>", "<|message|>", "<|call|>",
)  # fmt: skip

# family -> template files
FAMILY_TEMPLATES: dict[str, tuple[str, ...]] = {
    "qwen25": ("Qwen-Qwen2.5-7B-Instruct",),
    "qwen3": ("Qwen-Qwen3-0.6B",),
    "qwennext": ("Qwen-Qwen3-0.6B",),
    "qwen35": ("Qwen3.5-4B",),
    "glm47": ("GLM-4.7-Flash",),
    "glm5": ("GLM-4.7-Flash",),
    "nemotron3": ("NVIDIA-Nemotron-3-Nano-30B-A3B-BF16",),
    "kimi25": ("moonshotai-Kimi-K2",),
    "kimi26": ("moonshotai-Kimi-K2",),
    "minimax": ("MiniMax-M2",),
    "deepseekv32": ("deepseek-ai-DeepSeek-V3.2",),
    "deepseekv4": ("deepseek-ai-DeepSeek-V4",),
    "gptoss": ("openai-gpt-oss-120b",),
}


def _tokens(template: str) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Special tokens, the first one ending turns, and added ones that are not special."""
    for part, tokens in {
        "GLM": (_GLM, _SPEECH),
        "Kimi": (_KIMI[1:] + _KIMI[:1], ("<think>", "</think>")),
        "MiniMax": (
            _MINIMAX[1:] + _MINIMAX[:1],
            ("<think>", "</think>", "<minimax:tool_call>", "</minimax:tool_call>"),
        ),
        "DeepSeek": (_DEEPSEEK, _DEEPSEEK_SPEECH),
        "gpt-oss": (_HARMONY[1:] + _HARMONY[:1], ()),
    }.items():
        if part in template:
            return tokens
    return ("<|im_end|>", "<|endoftext|>", "<|im_start|>"), _SPEECH


@cache
def make_family_tokenizer(template: str) -> Any:
    """A fast tokenizer of the 256 bytes, a few merges, and the special tokens of the template's family.

    The merges make encoding and decoding no identity: a model that samples bytes is spelled differently by the template.
    """
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {c: i for i, c in enumerate(alphabet)}
    merges = [("t", "h"), ("th", "e"), ("a", "n"), ("o", "n"), ("i", "n"), ("e", "r"), ("\u010a", "\u010a"), ("a", "b")]
    core = Tokenizer(
        models.BPE(vocab=vocab | {a + b: len(vocab) + i for i, (a, b) in enumerate(merges)}, merges=merges)
    )
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    special, speech = _tokens(template)
    core.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    core.add_tokens([AddedToken(token, special=False, normalized=False) for token in speech])
    bos = "<｜begin▁of▁sentence｜>" if "DeepSeek" in template else None
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, eos_token=special[0], bos_token=bos)
    if not TEMPLATES.is_dir():
        raise FileNotFoundError(f"{TEMPLATES} is missing: run scripts/fetch_chat_templates.py once")
    tokenizer.chat_template = (TEMPLATES / f"{template}.jinja").read_text(encoding="utf-8")
    return tokenizer
