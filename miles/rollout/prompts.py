"""From a dataset row's prompt to token ids: the tokenizer, the chat template, and one way to encode both prompt forms."""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from miles.backends.training_utils.replay.expert_layout import ExpertLayout

Message = dict[str, Any]
Prompt = str | list[Message]


def load_tokenizer(args: Any) -> Any:
    """The run's tokenizer, with the template of `--chat-template-path` where one is given.

    Raises: ValueError that names the directory or file when either cannot be used.
    """
    from transformers import AutoTokenizer

    path = args.hf_checkpoint
    try:
        tokenizer = AutoTokenizer.from_pretrained(path, trust_remote_code=getattr(args, "trust_remote_code", False))
    except Exception as error:
        raise ValueError(
            f"--hf-checkpoint {path}: no tokenizer could be loaded ({type(error).__name__}: {error}). "
            "The directory needs tokenizer.json (or the model's own tokenizer files) next to its weights."
        ) from error
    template_path = getattr(args, "chat_template_path", None)
    if template_path:
        file = Path(template_path)
        if not file.is_file():
            raise ValueError(f"--chat-template-path {template_path}: no such file")
        tokenizer.chat_template = file.read_text(encoding="utf-8")
    return tokenizer


def shared_tokenizer(args: Any) -> Any:
    """`load_tokenizer`, once a process, for callers that keep no state of their own."""
    return _load_once(
        str(args.hf_checkpoint), getattr(args, "chat_template_path", None), getattr(args, "trust_remote_code", False)
    )


@lru_cache(maxsize=4)
def _load_once(hf_checkpoint: str, template_path: str | None, trust: bool) -> Any:
    return load_tokenizer(
        SimpleNamespace(hf_checkpoint=hf_checkpoint, chat_template_path=template_path, trust_remote_code=trust)
    )


def chat_template_kwargs(args: Any) -> dict[str, Any]:
    """`--apply-chat-template-kwargs` as a dict; the flag may hold JSON text."""
    value = getattr(args, "apply_chat_template_kwargs", None) or {}
    if isinstance(value, str):
        value = json.loads(value)
    if not isinstance(value, Mapping):
        raise ValueError(f"--apply-chat-template-kwargs must be a JSON object, not {value!r}")
    return dict(value)


def render_chat(
    tokenizer: Any,
    messages: list[Message],
    *,
    tools: list[dict] | None = None,
    add_generation_prompt: bool = True,
    kwargs: Mapping[str, Any] | None = None,
) -> str:
    """The conversation as text, in the model's chat format.

    Raises: ValueError when the tokenizer has no template or the template refuses the conversation.
    """
    if not tokenizer.chat_template:
        raise ValueError(
            "the tokenizer has no chat template: pass --chat-template-path FILE, or use string prompts without --apply-chat-template"
        )
    try:
        return tokenizer.apply_chat_template(
            messages, tools=tools, tokenize=False, add_generation_prompt=add_generation_prompt, **(kwargs or {})
        )
    except Exception as error:
        raise ValueError(f"the chat template refused the conversation: {type(error).__name__}: {error}") from error


def encode_prompt(args: Any, tokenizer: Any, prompt: Prompt, tools: list[dict] | None = None) -> list[int]:
    """Token ids of a prompt. A string is final text; messages go through the chat template.

    No special tokens are added in either case: a template writes its own, and a bare string is taken as it is.
    """
    if not isinstance(prompt, str):
        prompt = render_chat(tokenizer, prompt, tools=tools, kwargs=chat_template_kwargs(args))
    return tokenizer(prompt, add_special_tokens=False)["input_ids"]


def model_config(args: Any) -> dict[str, Any]:
    """The text part of `config.json` in `--hf-checkpoint`; empty when there is none."""
    file = Path(str(getattr(args, "hf_checkpoint", ""))) / "config.json"
    if not file.is_file():
        return {}
    config = json.loads(file.read_text(encoding="utf-8"))
    return {**config, **(config.get("text_config") or {})}


def expert_layout(args: Any) -> ExpertLayout:
    """The layers with experts of the model in `--hf-checkpoint`. Raises: ValueError for a dense model."""
    layout = ExpertLayout.from_config(model_config(args))
    if layout is None:
        raise ValueError(f"--use-rollout-routing-replay: the model in {args.hf_checkpoint} has no experts")
    return layout


def model_context_length(args: Any) -> int | None:
    """Most tokens a sequence may have: `--rollout-max-context-len`, else what the model's config says, else None."""
    return getattr(args, "rollout_max_context_len", None) or model_config(args).get("max_position_embeddings")
