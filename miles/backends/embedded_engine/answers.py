"""SGLang's answer to one request, finished or as it stands."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

from miles.backends.embedded_engine.generate_api import EngineFacts, GenerateCall
from miles.backends.embedded_engine.request import Request, TopLogprobs
from miles.backends.embedded_engine.stopping import final_text


def answer(request: Request, call: GenerateCall, facts: EngineFacts, weight_version: str) -> dict[str, Any]:
    """The response object of one request as it stands: final, or a chunk of a stream (cumulative)."""
    out: dict[str, Any] = {}
    finish = request.finish_reason
    ids = list(request.output_ids)
    if facts.tokenizer is not None:
        out["text"] = final_text(facts.tokenizer, ids, request.params, finish)
    out["output_ids"] = ids
    out["meta_info"] = meta_info(request, facts, weight_version, call.text_in_logprobs, finish, len(ids))
    if call.return_prompt_token_ids:
        out["prompt_token_ids"] = request.input_ids
    return out


def meta_info(
    request: Request, facts: EngineFacts, weight_version: str, text_in_logprobs: bool, finish: dict | None, n: int
) -> dict[str, Any]:
    """SGLang's meta_info over the first `n` output tokens; the engine may be appending more meanwhile."""

    def text(token: int) -> str | None:
        return facts.tokenizer.decode([token]) if text_in_logprobs and facts.tokenizer is not None else None

    meta: dict[str, Any] = {
        "id": request.rid,
        "finish_reason": finish,
        "prompt_tokens": len(request.input_ids),
        "completion_tokens": n,
        "cached_tokens": request.cached_tokens,
        "cached_tokens_details": None,
        "reasoning_tokens": 0,
        "weight_version": request.weight_version or weight_version,
        "weight_versions": request.version_spans(),
        "num_retractions": request.retractions,
        "dp_rank": None,
        "e2e_latency": time.monotonic() - request.arrived,
        "response_sent_to_client_ts": time.time(),
    }
    if request.return_logprob:
        meta |= _logprobs(request, text, n)
    if request.return_routed_experts:
        meta["routed_experts"] = request.encoded_routes()
    return meta


def _logprobs(request: Request, text: Callable[[int], str | None], n: int) -> dict[str, Any]:
    def rows(tops: Sequence[TopLogprobs | None]) -> list[Any]:
        return [None if top is None else [[p, t, text(t)] for p, t in top] for top in tops]

    prompt = request.input_ids[request.logprob_start_len :] if request.input_logprobs else []
    meta: dict[str, Any] = {
        "input_token_logprobs": [
            [p, t, text(t)] for p, t in zip(request.input_logprobs, prompt[: len(request.input_logprobs)], strict=True)
        ],
        "output_token_logprobs": [
            [p, t, text(t)] for p, t in zip(request.output_logprobs[:n], request.output_ids[:n], strict=True)
        ],
        "output_token_logprobs_length": n,
    }
    if request.top_logprobs_num:
        meta["input_top_logprobs"] = rows(request.input_top)
        meta["output_top_logprobs"] = rows(request.output_top[:n])
    if request.token_ids_logprob:
        meta["input_token_ids_logprobs"] = rows(request.input_chosen)
        meta["output_token_ids_logprobs"] = rows(request.output_chosen[:n])
    return meta
