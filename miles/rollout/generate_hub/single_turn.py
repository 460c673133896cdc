"""The default generate function: one prompt, one response, token ids all the way."""

from __future__ import annotations

from miles.rollout.base_types import GenerateFnInput, GenerateFnOutput
from miles.rollout.generate_hub.engine_call import sample_tokens


async def generate(input: GenerateFnInput) -> GenerateFnOutput:
    """Sample a response, or the rest of one: a sample that comes with response tokens is continued after them.

    The prompt is encoded once, by the client; the engine is given ids and gives ids back, and text is only for rewards.
    """
    sample = input.sample
    if not sample.tokens:
        sample.tokens = input.state.prompt_ids(sample)
    await sample_tokens(input)
    return GenerateFnOutput(samples=sample)
