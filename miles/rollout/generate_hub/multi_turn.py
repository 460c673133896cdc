"""Generate, run the tools that the model calls, append what they say, and go on until it stops calling.

Tool results are environment tokens: mask 0, log-prob 0. Sampled ids are never decoded and encoded again.
"""

from __future__ import annotations

import asyncio
import inspect
import time
from typing import Any

from miles.rollout.base_types import GenerateFnInput, GenerateFnOutput
from miles.rollout.compat import call
from miles.rollout.generate_hub.engine_call import GenerationError, decode_response, sample_tokens, token_budget
from miles.rollout.generate_utils.chat_delta import tool_messages, turn_delta
from miles.rollout.generate_utils.tool_calls import ToolCall, tool_call_parser
from miles.rollout.prompts import chat_template_kwargs
from miles.utils.imports import load_function
from miles.utils.types import SampleStatus


async def generate(input: GenerateFnInput) -> GenerateFnOutput:
    """One sample with as many turns as its tool calls ask for.

    Ends COMPLETED when a turn has no tool call, TRUNCATED at the response limit, the context length or
    `--generate-max-turns`. An aborted sample starts over when it is generated again: its tools' state is gone.
    """
    args, sample = input.args, input.sample
    if sample.status is SampleStatus.ABORTED and sample.response_length:
        sample.reset_for_retry()
    parse = tool_call_parser(args.generate_tool_call_parser or "qwen25")
    specs = sample.metadata.get("tools") or load_function(args.generate_tool_specs_path)
    if not sample.tokens:
        sample.tokens = input.state.prompt_ids(sample, specs)
    for turn in range(args.generate_max_turns):
        begun = len(sample.tokens)
        await sample_tokens(input)
        sampled = sample.tokens[begun:]
        if sample.status is not SampleStatus.COMPLETED:
            break
        calls = parse(input.state.tokenizer.decode(sampled))
        if not calls:
            break
        if turn + 1 == args.generate_max_turns:
            sample.status = SampleStatus.TRUNCATED
            break
        if not await _run_tools(input, sampled, calls, specs):
            break
    sample.response = decode_response(input, sample)
    return GenerateFnOutput(samples=sample)


async def _run_tools(input: GenerateFnInput, sampled: list[int], calls: list[ToolCall], specs: Any) -> bool:
    """Append the answers of all calls. False when that ends the sample: no room, or the batch is being cut off."""
    sample, started = input.sample, time.monotonic()
    answers = await asyncio.gather(*(_answer(input.args, one) for one in calls))
    sample.non_generation_time += time.monotonic() - started
    said, results = tool_messages(calls, answers)
    kwargs = chat_template_kwargs(input.args)
    delta = turn_delta(input.state.tokenizer, sampled, said, results, tools=specs, kwargs=kwargs)
    if len(delta) >= token_budget(input):
        sample.status = SampleStatus.TRUNCATED
        return False
    sample.append_response(delta, log_probs=None, trainable=False)
    if input.state.aborted:
        sample.status = SampleStatus.ABORTED
    return not input.state.aborted


async def _answer(args: Any, one: ToolCall) -> str:
    """What the tool says. A call that cannot be executed is answered with its error; a tool that raises is a failure."""
    if one.error is not None:
        return f"Error: {one.error}"
    path = getattr(args, "generate_execute_tool_function_path", None)
    if not path:
        raise GenerationError(
            "no_tool_function",
            f"the model called {one.name!r}; set --generate-execute-tool-function-path to a function (name, params) -> str",
            permanent=True,
        )
    try:
        answer = await call(load_function(path), one.name, one.arguments)
    except Exception as error:
        raise GenerationError("tool_error", f"tool {one.name!r} raised {type(error).__name__}: {error}") from error
    if inspect.isawaitable(answer):
        answer = await answer
    return answer if isinstance(answer, str) else str(answer)
