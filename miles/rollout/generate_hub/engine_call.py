"""One engine call for one sample: the request, and the checked answer appended to the sample."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from miles.backends.training_utils.replay.expert_layout import RouteError
from miles.rollout.base_types import GenerateFnInput
from miles.utils.types import Sample, SampleStatus, VersionSpan


class GenerationError(RuntimeError):
    """A sample that could not be generated. `category` is what metrics count; `permanent` means a retry cannot help."""

    def __init__(self, category: str, message: str, *, permanent: bool = False) -> None:
        super().__init__(message)
        self.category, self.permanent = category, permanent


def token_budget(input: GenerateFnInput) -> int:
    """Tokens that this sample may still get: its response limit less what it has, within the context length."""
    sample, limit = input.sample, _context_length(input)
    most = input.sampling_params.get("max_new_tokens")
    if most is None and limit is None:
        raise GenerationError("no_limit", "nothing bounds a response: set --rollout-max-response-len", permanent=True)
    budgets = [] if most is None else [most - sample.response_length]
    return min([*budgets, *([] if limit is None else [limit - len(sample.tokens)])])


def _context_length(input: GenerateFnInput) -> int | None:
    return input.state.eval_context_length if input.evaluation else input.state.context_length


async def sample_tokens(input: GenerateFnInput) -> None:
    """Let an engine continue `sample.tokens`; append what it sampled, and take status and counters from the answer.

    Without room for a token the sample becomes TRUNCATED (or an error, when it has no response at all).
    Raises: GenerationError for an answer that breaks the token contract, engine errors as the pool raises them.
    """
    sample, budget = input.sample, token_budget(input)
    if budget <= 0:
        if sample.response_length == 0:
            context = _context_length(input) or 0
            flag = "--eval-max-prompt-len" if input.evaluation else "--rollout-max-prompt-len"
            raise GenerationError(
                "prompt_too_long",
                f"sample {sample.index}: a prompt of {len(sample.tokens)} tokens leaves no room for a response in a context "
                f"of {context}; {flag} {context - 1} leaves such prompts out",
                permanent=True,
            )
        sample.status = SampleStatus.TRUNCATED
        return
    answer = await input.state.engines.generate(_payload(input, budget), routing_key=sample.routing_key)
    _append_answer(input, answer)


def _payload(input: GenerateFnInput, budget: int) -> dict[str, Any]:
    payload: dict[str, Any] = {
        "input_ids": list(input.sample.tokens),
        "sampling_params": {**input.sampling_params, "max_new_tokens": budget},
        "return_logprob": True,
    }
    if _wants_routes(input):
        have = input.sample.rollout_routed_experts
        payload |= {"return_routed_experts": True, "routed_experts_start_len": 0 if have is None else len(have)}
    return payload


def _wants_routes(input: GenerateFnInput) -> bool:
    """Evaluation samples do not train: their routes would travel for nothing."""
    return bool(getattr(input.args, "use_rollout_routing_replay", False)) and not input.evaluation


def _append_answer(input: GenerateFnInput, answer: dict[str, Any]) -> None:
    sample, meta = input.sample, answer["meta_info"]
    token_ids, log_probs = answer_tokens(sample, answer)
    fresh = sample.response_length == 0
    sample.append_response(token_ids, log_probs=log_probs, trainable=True, spans=version_spans(meta, len(token_ids)))
    if _wants_routes(input) and token_ids:
        _append_routes(input, meta.get("routed_experts"))
    sample.response = answer["text"] if fresh and "text" in answer else decode_response(input, sample)
    sample.update_from_meta_info(input.args, meta)


def decode_response(input: GenerateFnInput, sample: Sample) -> str:
    """The response as text, from all its tokens: a character may span two calls."""
    if not sample.response_length:
        return ""
    skip = input.sampling_params.get("skip_special_tokens", False)
    return input.state.tokenizer.decode(sample.tokens[-sample.response_length :], skip_special_tokens=skip)


def answer_tokens(sample: Sample, answer: dict[str, Any]) -> tuple[list[int], list[float]]:
    """Sampled ids and their log-probs, from the engine's pairs, so that the two can never be out of step."""
    pairs = answer["meta_info"].get("output_token_logprobs")
    output_ids = answer.get("output_ids")
    if pairs is None:
        if output_ids:
            raise GenerationError("bad_answer", f"sample {sample.index}: the engine gave tokens without log-probs")
        return [], []
    token_ids, log_probs = [pair[1] for pair in pairs], [pair[0] for pair in pairs]
    if output_ids is not None and list(output_ids) != token_ids:
        raise GenerationError(
            "bad_answer",
            f"sample {sample.index}: the engine's output_ids ({len(output_ids)}) and the ids of its log-probs ({len(token_ids)}) differ",
        )
    bad = [i for i, value in enumerate(log_probs) if value is None or not math.isfinite(value)]
    if bad:
        raise GenerationError(
            "bad_logprob", f"sample {sample.index}: log-prob of sampled token {bad[0]} is {log_probs[bad[0]]}"
        )
    return token_ids, log_probs


def version_spans(meta: dict[str, Any], count: int) -> list[VersionSpan]:
    """Weight version of each of the `count` new tokens.

    Engines without per-token versions report the one at the end of the call, for all tokens; versions that are no
    numbers (an engine that never saw an update says `default`) give no span.
    """
    reported = meta.get("weight_versions")
    if reported is None:
        reported = [{"version": meta.get("weight_version"), "start": 0, "end": count}]
    spans = []
    for span in reported:
        start, end = max(span["start"], 0), min(span["end"], count)
        if end > start and str(span["version"]).isdigit():
            spans.append(VersionSpan(int(span["version"]), start, end))
    return spans


def _append_routes(input: GenerateFnInput, encoded: str | None) -> None:
    """Append the rows that the sample does not have yet: those of earlier calls stay as they were when their tokens were sampled."""
    sample, have = input.sample, input.sample.rollout_routed_experts
    if not encoded:
        raise GenerationError(
            "bad_routes",
            f"sample {sample.index}: the engine sent no routed experts with its tokens: it was started without --enable-return-routed-experts",
            permanent=True,
        )
    rows = len(sample.tokens) - 1 - (0 if have is None else len(have))
    try:
        routes = input.state.expert_layout.decode(encoded, rows)
    except RouteError as error:
        raise GenerationError("bad_routes", f"sample {sample.index}: {error}") from error
    sample.rollout_routed_experts = routes if have is None else np.concatenate([have, routes])
