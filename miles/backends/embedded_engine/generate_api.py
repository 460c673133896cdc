"""`/generate`: from a JSON body to requests."""

from __future__ import annotations

import itertools
import secrets
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from miles.backends.embedded_engine.model_config import ModelConfig
from miles.backends.embedded_engine.request import Request
from miles.backends.embedded_engine.sampling_params import RequestError, SamplingParams, parse_sampling_params
from miles.backends.embedded_engine.stopping import GrowingText
from miles.utils.seeds import derive_seed

# Request ids for those who send none: unique, of one length (an abort matches prefixes), and without a system call each.
_RID_PREFIX, _rid_numbers = uuid.uuid4().hex[:16], itertools.count()

# Fields of SGLang's request that this engine implements; a list where a batch may give one value a prompt.
_FIELDS: dict[str, type | tuple[type, ...]] = {
    "input_ids": list,
    "text": (str, list),
    "sampling_params": (dict, list),
    "rid": (str, list),
    "return_logprob": (bool, list),
    "logprob_start_len": (int, list),
    "top_logprobs_num": (int, list),
    "token_ids_logprob": list,
    "return_text_in_logprobs": bool,
    "stream": bool,
    "return_routed_experts": bool,
    "routed_experts_start_len": int,
    "return_prompt_token_ids": bool,
    "extra_key": (str, list),
    "cache_salt": (str, list),
}
# Fields that change nothing here: routing hints, and switches for output that this engine always or never has.
_IGNORED = {
    "routing_key",
    "conversation_id",
    "priority",
    "routed_dp_rank",
    "data_parallel_rank",
    "log_metrics",
    "return_bytes",
    "background",
}
# Fields of features that this engine does not have: refused unless they ask for nothing.
_REFUSED = {
    "input_embeds",
    "image_data",
    "audio_data",
    "video_data",
    "return_hidden_states",
    "return_sampling_mask",
    "sampling_logprobs_mode",
    "return_indexer_topk",
    "session_params",
    "session_id",
    "lora_path",
    "lora_id",
    "custom_logit_processor",
    "bootstrap_host",
    "bootstrap_port",
    "bootstrap_room",
    "return_entropy",
}


@dataclass(frozen=True)
class EngineFacts:
    """What request handling needs to know of the engine. `capacity`: tokens that one request may occupy at most."""

    config: ModelConfig
    tokenizer: Any  # None where the directory has none
    eos_token_ids: frozenset[int]
    capacity: int


@dataclass
class GenerateCall:
    """A parsed /generate body: its requests in answer order, and how to answer."""

    requests: list[Request]
    as_list: bool
    stream: bool
    return_prompt_token_ids: bool
    text_in_logprobs: bool


def parse_generate(body: Any, facts: EngineFacts, emit: Callable[[Request], None]) -> GenerateCall:
    """Check a /generate body. Raises: RequestError that lists everything wrong with it."""
    _check_fields(body, facts.config.vocab_size)
    prompts, as_list = _prompts(body, facts)
    n = len(prompts)
    params = [
        parse_sampling_params(raw, facts.config.vocab_size)
        for raw in _per_prompt(body.get("sampling_params"), n, "sampling_params", (dict, type(None)))
    ]
    logprob = _per_prompt(body.get("return_logprob", False), n, "return_logprob", (bool,))
    start = _per_prompt(body.get("logprob_start_len", -1), n, "logprob_start_len", (int,))
    top = _per_prompt(body.get("top_logprobs_num", 0), n, "top_logprobs_num", (int,))
    chosen = body.get("token_ids_logprob") or []
    chosen = chosen if chosen and isinstance(chosen[0], list) else [chosen] * n
    namespace = [
        f"{a or ''}\x1f{b or ''}"
        for a, b in zip(
            _per_prompt(body.get("extra_key"), n, "extra_key", (str, type(None))),
            _per_prompt(body.get("cache_salt"), n, "cache_salt", (str, type(None))),
            strict=True,
        )
    ]
    copies = sum(p.n for p in params)
    rids = _rids(body.get("rid"), [p.n for p in params])
    problems = [
        f"prompt {i}: {problem}" if as_list else problem
        for i in range(n)
        for problem in _problems(prompts[i], params[i], start[i], chosen[i], body, facts)
    ]
    if problems:
        raise RequestError("; ".join(problems))
    requests: list[Request] = []
    for i in range(n):
        for copy in range(params[i].n):
            requests.append(
                Request(
                    rid=rids[len(requests)],
                    input_ids=prompts[i],
                    params=params[i],
                    seed=_seed(params[i], copy),
                    # `ignore_eos` covers every stop token, as in SGLang.
                    stop_ids=frozenset()
                    if params[i].ignore_eos
                    else facts.eos_token_ids.union(params[i].stop_token_ids),
                    emit=emit,
                    stream=bool(body.get("stream")),
                    return_logprob=logprob[i],
                    logprob_start_len=start[i],
                    top_logprobs_num=top[i],
                    token_ids_logprob=tuple(chosen[i]),
                    return_routed_experts=bool(body.get("return_routed_experts")),
                    routed_experts_start_len=body.get("routed_experts_start_len") or 0,
                    cache_namespace=namespace[i],
                    stopper=GrowingText(facts.tokenizer, params[i]) if params[i].stop else None,
                )
            )
    return GenerateCall(
        requests=requests,
        as_list=as_list or copies > n,
        stream=bool(body.get("stream")),
        return_prompt_token_ids=bool(body.get("return_prompt_token_ids")),
        text_in_logprobs=bool(body.get("return_text_in_logprobs")),
    )


def _check_fields(body: Any, vocab_size: int) -> None:
    if not isinstance(body, dict):
        raise RequestError(f"the body must be a JSON object, got {type(body).__name__}")
    problems = []
    for name, value in body.items():
        if value is None or name in _IGNORED:
            continue
        if name in _REFUSED:
            if value not in (False, [], {}, ""):
                problems.append(f"{name} is not supported by the embedded engine")
        elif name not in _FIELDS:
            problems.append(f"unknown field {name!r}")
        elif not isinstance(value, _FIELDS[name]):
            problems.append(f"{name} has type {type(value).__name__}")
    if problems:  # then the prompts may be unreadable, but the parameters can still be judged
        for raw in (
            body["sampling_params"] if isinstance(body.get("sampling_params"), list) else [body.get("sampling_params")]
        ):
            try:
                parse_sampling_params(raw, vocab_size)
            except RequestError as error:
                problems.append(str(error))
        raise RequestError("; ".join(problems))


def _prompts(body: dict[str, Any], facts: EngineFacts) -> tuple[list[list[int]], bool]:
    ids, text = body.get("input_ids"), body.get("text")
    if (ids is None) == (text is None):
        raise RequestError("give exactly one of input_ids and text")
    if ids is not None:
        as_list = bool(ids) and isinstance(ids[0], list)
        return (ids if as_list else [ids]), as_list
    if facts.tokenizer is None:
        raise RequestError("this model directory has no tokenizer: send input_ids instead of text")
    texts: list[str] = [text] if isinstance(text, str) else list(text or ())
    if not all(isinstance(t, str) for t in texts):
        raise RequestError("text must be a string or a list of strings")
    return [facts.tokenizer.encode(t) for t in texts], not isinstance(text, str)


def _per_prompt(value: Any, n: int, name: str, kinds: tuple[type, ...]) -> list[Any]:
    values = value if isinstance(value, list) else [value] * n
    if len(values) != n:
        raise RequestError(f"{name} has {len(values)} entries for {n} prompts")
    if not all(isinstance(v, kinds) for v in values):
        raise RequestError(f"{name} has an entry of the wrong type")
    return values


def _rids(rid: str | list[str] | None, copies: list[int]) -> list[str]:
    total = sum(copies)
    if isinstance(rid, list):
        if len(rid) != len(copies):
            raise RequestError(f"rid has {len(rid)} entries for {len(copies)} prompts")
        names = [r if n == 1 else f"{r}_{i}" for r, n in zip(rid, copies, strict=True) for i in range(n)]
    elif rid is not None:
        names = [rid] if total == 1 else [f"{rid}_{i}" for i in range(total)]
    else:
        names = [f"{_RID_PREFIX}{next(_rid_numbers):016x}" for _ in range(total)]
    if len(set(names)) != len(names):
        raise RequestError("rid has duplicates")
    return names


def _problems(
    ids: list[int], params: SamplingParams, start: int, chosen: list[int], body: dict[str, Any], facts: EngineFacts
) -> list[str]:
    vocab, context = facts.config.vocab_size, facts.config.context_length
    problems = []
    if not ids:
        return ["the prompt is empty"]
    if set(map(type, ids)) != {int}:
        return ["input_ids must be integers"]
    if min(ids) < 0 or max(ids) >= vocab:
        at = next(i for i, t in enumerate(ids) if not 0 <= t < vocab)
        problems.append(f"token id {ids[at]} at position {at} is outside the vocabulary of {vocab}")
    total = len(ids) + params.max_new_tokens
    if len(ids) >= context + (params.max_new_tokens == 0):
        problems.append(f"the prompt has {len(ids)} tokens, the model's context {context}")
    elif total > context:
        problems.append(
            f"{len(ids)} prompt tokens and max_new_tokens {params.max_new_tokens} exceed the context of {context}"
        )
    elif total > facts.capacity:
        problems.append(f"{total} tokens do not fit the cache of {facts.capacity}: raise --max-total-tokens")
    if not -1 <= start <= len(ids):
        problems.append(f"logprob_start_len {start} is not in [-1, {len(ids)}]")
    if not all(type(t) is int and 0 <= t < vocab for t in chosen):
        problems.append(f"token_ids_logprob has an id outside the vocabulary of {vocab}")
    if params.stop and facts.tokenizer is None:
        problems.append("stop strings need a tokenizer, which this model directory lacks: use stop_token_ids")
    if body.get("return_routed_experts") and facts.config.moe is None:
        problems.append("return_routed_experts: this model has no experts")
    first = body.get("routed_experts_start_len") or 0
    if not 0 <= first <= len(ids):
        problems.append(f"routed_experts_start_len {first} is not in [0, {len(ids)}]")
    return problems


def _seed(params: SamplingParams, copy: int) -> int:
    if params.sampling_seed is None:
        return secrets.randbits(64)
    return params.sampling_seed % 2**64 if copy == 0 else derive_seed(params.sampling_seed, copy)
