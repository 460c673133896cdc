"""Hooks of our side of `trl_step`: responses of full length, and the reward that TRL's side computes too."""

from __future__ import annotations

import dataclasses
from typing import Any

from miles.rollout.base_types import GenerateFnInput, GenerateFnOutput
from miles.rollout.generate_hub import single_turn
from miles.utils.types import Sample


async def generate_full_length(input: GenerateFnInput) -> GenerateFnOutput:
    """Single turn, ended by the token limit alone."""
    params = {**input.sampling_params, "ignore_eos": True}
    output = await single_turn.generate(dataclasses.replace(input, sampling_params=params))
    if output.samples.response_length != params["max_new_tokens"]:
        raise ValueError(f"a response of {output.samples.response_length} tokens: the work is not the same")
    return output


async def letters_in_place(args: Any, sample: Sample) -> float:
    """The share of the label's characters that stand where they should."""
    return sum(a == b for a, b in zip(sample.response, sample.label, strict=False)) / max(len(sample.label), 1)
