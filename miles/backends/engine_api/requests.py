"""What is wrong with a generation request, found before it is sent: SGLang ends, or answers 500, where it could say so."""

from __future__ import annotations

from typing import Any

# Every key that some release from 0.5.6 to 0.5.23 takes.
SAMPLING_PARAMS = frozenset(
    [
        "max_new_tokens",
        "min_new_tokens",
        "n",
        "temperature",
        "top_p",
        "top_k",
        "min_p",
        "frequency_penalty",
        "presence_penalty",
        "repetition_penalty",
        "stop",
        "stop_token_ids",
        "stop_regex",
        "ignore_eos",
        "no_stop_trim",
        "skip_special_tokens",
        "spaces_between_special_tokens",
        "json_schema",
        "regex",
        "ebnf",
        "structural_tag",
        "logit_bias",
        "sampling_seed",
        "custom_params",
        "beam_width",
        "stream_interval",
    ]
)


def check_token_ids(input_ids: Any, vocab_size: int | None) -> None:
    """Raise ValueError for the first id outside `[0, vocab_size)`: an engine would read beyond its embedding table."""
    if vocab_size is None or not input_ids:
        return
    for row in input_ids if isinstance(input_ids[0], list | tuple) else [input_ids]:
        if row and not (min(row) >= 0 and max(row) < vocab_size):
            at, token = next((i, t) for i, t in enumerate(row) if not 0 <= t < vocab_size)
            raise ValueError(f"prompt token {at} is {token}; the model's vocabulary has {vocab_size} ids")


def check_sampling_params(params: Any) -> None:
    """Raise ValueError for keys of `sampling_params` (a dict, or one a request) that no server knows."""
    for each in params if isinstance(params, list | tuple) else [params or {}]:
        if unknown := sorted(set(each) - SAMPLING_PARAMS):
            raise ValueError(f"sampling_params has {', '.join(unknown)}, which no engine knows; a misspelling?")
