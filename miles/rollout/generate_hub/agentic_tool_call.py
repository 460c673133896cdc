"""An agent of the user's talks to the model through a session; the session's tokens are the sample.

    async def run(base_url, prompt, request_kwargs, metadata, **kwargs) -> dict

`base_url` takes the place of an API's address (the agent appends `/v1` for OpenAI clients). What the agent returns becomes
metadata; `reward` in it is the reward. How it ended is never guessed:

    a dict                          ok, unless it says otherwise: `{"outcome": "ok" | "drop" | "failed", "reason": ...}`
    None                            drop: the agent has nothing to train on (return {} for "ok, nothing to add")
    an exception, or --agent-timeout    failed: generated again, at most --max-sample-retries times

A dropped or failed sample has no reward and does not train.
"""

from __future__ import annotations

import asyncio
import copy
import logging
from typing import Any

from miles.rollout.base_types import GenerateFnInput, GenerateFnOutput
from miles.rollout.compat import call
from miles.rollout.generate_hub.engine_call import GenerationError
from miles.rollout.session.client import SessionClient
from miles.rollout.session.wire import SessionSamples
from miles.rollout.tito.mismatch import HARD
from miles.utils.imports import load_function
from miles.utils.types import Sample

logger = logging.getLogger(__name__)

# An engine's parameter -> the name that chat APIs have for it. The seed is the session's: each turn gets one of its own.
_CHAT_NAMES = {"max_new_tokens": "max_tokens", "min_new_tokens": "min_tokens"} | {
    name: name
    for name in (
        "temperature", "top_p", "top_k", "min_p", "stop", "stop_token_ids", "presence_penalty", "frequency_penalty",
        "repetition_penalty", "max_tokens", "min_tokens", "logit_bias", "ignore_eos",
    )
}  # fmt: skip
_ABORT_TICK_S = 0.1


async def generate(input: GenerateFnInput) -> GenerateFnOutput:
    """Run the agent of `--custom-agent-function-path` once: one sample (v1), or one for each kept branch (v2).

    Raises: GenerationError with what the agent did wrong, SessionCallError for a session server that fails.
    """
    args, sample = input.args, input.sample
    if isinstance(sample.prompt, str):
        raise GenerationError(
            "prompt_is_text",
            f"sample {sample.index}: an agent takes messages, and this prompt is text: drop --apply-chat-template",
            permanent=True,
        )
    limit = getattr(args, "max_seq_len", None)
    session = await SessionClient.open(args, seed=input.sampling_params.get("sampling_seed"), max_seq_len=limit)
    try:
        facts = await _run_agent(input, session)
        if facts is None:  # the batch was cut off
            sample.reset_for_retry()
            return GenerateFnOutput(samples=sample)
        collected = await session.collect(_blank(sample), max_seq_len=limit, agent_metadata=facts)
    finally:
        await session.close()
    return _output(input, collected, facts)


async def _run_agent(input: GenerateFnInput, session: SessionClient) -> dict[str, Any] | None:
    """What the agent returns, checked; None when the batch is being cut off. Raises: GenerationError."""
    args, sample = input.args, input.sample
    metadata = {
        **copy.deepcopy(sample.metadata),
        "max_seq_len": getattr(args, "max_seq_len", None),
        "session_id": session.session_id,
        "session_server_id": session.server_id,
        "session_server_instance_id": (getattr(args, "session_server_instance_ids", None) or {}).get(session.port),
    }
    agent = asyncio.create_task(
        call(
            load_function(args.custom_agent_function_path),
            base_url=session.base_url,
            prompt=copy.deepcopy(sample.prompt),
            request_kwargs=request_kwargs(input.sampling_params),
            metadata=metadata,
        )
    )
    timeout = getattr(args, "agent_timeout", None)
    deadline = None if timeout is None else asyncio.get_running_loop().time() + timeout
    try:
        while not agent.done():
            await asyncio.wait([agent], timeout=_ABORT_TICK_S)
            if agent.done():
                break
            if input.state.aborted:
                return None
            if deadline is not None and asyncio.get_running_loop().time() > deadline:
                raise GenerationError(
                    "agent_timeout", f"sample {sample.index}: the agent took more than {timeout:g} s (--agent-timeout)"
                )
        if input.state.aborted and agent.exception() is not None:
            return None  # its requests were aborted
        return _checked(sample, agent)
    finally:
        await _end(agent)


def _checked(sample: Sample, agent: asyncio.Task) -> dict[str, Any]:
    error = agent.exception()
    if error is not None:
        text = f"sample {sample.index}: the agent raised {type(error).__name__}: {error}"
        raise GenerationError("agent_error", text) from error
    facts = agent.result()
    if facts is None:
        raise GenerationError(
            "agent_dropped",
            f"sample {sample.index}: the agent returned None, which drops the sample; return a dict, {{}} at least, to keep it",
            permanent=True,
        )
    if not isinstance(facts, dict):
        raise GenerationError(
            "agent_error",
            f"sample {sample.index}: the agent returned a {type(facts).__name__}, not a dict",
            permanent=True,
        )
    outcome, reason = facts.get("outcome", "ok"), facts.get("reason", "no reason given")
    if outcome == "drop":
        raise GenerationError("agent_dropped", f"sample {sample.index}: dropped by the agent: {reason}", permanent=True)
    if outcome == "failed":
        raise GenerationError("agent_failed", f"sample {sample.index}: failed by the agent: {reason}")
    if outcome != "ok":
        raise GenerationError(
            "agent_error", f"sample {sample.index}: outcome {outcome!r} is none of ok, drop, failed", permanent=True
        )
    return facts


async def _end(agent: asyncio.Task) -> None:
    if not agent.done():
        agent.cancel()
        await asyncio.wait([agent], timeout=5.0)


def request_kwargs(sampling_params: dict[str, Any]) -> dict[str, Any]:
    """Sampling parameters under the names of chat requests; what is None, or has no such name, is left out."""
    out: dict[str, Any] = {}
    for name, value in sampling_params.items():
        target = _CHAT_NAMES.get(name)
        if target is not None and value is not None and (name == target or target not in sampling_params):
            out[target] = value
    return out


def _blank(sample: Sample) -> Sample:
    """The sample before anything was generated, for a retry as for the first time."""
    blank = copy.deepcopy(sample)
    blank.reset_for_retry()
    return blank


def _output(input: GenerateFnInput, collected: SessionSamples, facts: dict[str, Any]) -> GenerateFnOutput:
    args, sample = input.args, input.sample
    if not collected.samples:
        why = {
            "no_records": ("agent_made_no_call", "the agent never got an answer of the model"),
            "all_truncated": ("prompt_too_long", "nothing that the model said lies within --max-seq-len"),
        }[collected.empty_reason or "no_records"]
        raise GenerationError(
            why[0], f"sample {sample.index}: {why[1]}", permanent=collected.empty_reason == "all_truncated"
        )
    tool_time = float((facts.get("agent_metrics") or {}).get("total_tool_time") or 0.0)
    for one in collected.samples:
        one.non_generation_time = tool_time
        if getattr(args, "ci_test", False):
            _check_mismatch(one)
    if args.use_session_server == "v2":
        for one in collected.samples:
            one.rollout_id = sample.index if sample.rollout_id is None else sample.rollout_id
        return GenerateFnOutput(samples=collected.samples)
    return GenerateFnOutput(samples=collected.samples[0])


def _check_mismatch(sample: Sample) -> None:
    """`--ci-test`: tokens that a broken template or seam explains are an error; what the model spelled its own way is not."""
    entries = sample.metadata.get("tito_session_mismatch")
    hard = [entry for entry in entries or [] if entry["type"] in HARD]
    if entries is None or hard:
        what = (
            f"{hard[0]['type']}: expected {hard[0]['expected_text']!r}, have {hard[0]['actual_text']!r}"
            if hard
            else "no diagnosis"
        )
        raise GenerationError("tito_session_mismatch", f"sample {sample.index}: {what}", permanent=True)
