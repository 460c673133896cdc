"""Supervised fine-tuning through the rollout door: the data set's own responses become the samples, no engine involved.

Rows are conversations (`--input-key messages`, all assistant turns are learned) or prompt and response (`--label-key`).
"""

from __future__ import annotations

import asyncio
from typing import Any

from miles.rollout.base_types import RolloutFnTrainOutput
from miles.rollout.data_source import DataSource
from miles.rollout.loss_masks import LossMaskBuilder
from miles.rollout.prompts import chat_template_kwargs, encode_prompt, shared_tokenizer
from miles.utils.types import Sample, SampleStatus


def fill_sample(args: Any, tokenizer: Any, masks: LossMaskBuilder, sample: Sample) -> None:
    """Turn a data set row into a finished sample: tokens, and a loss mask over its response.

    The response begins at the first trained token. Raises: ValueError that names the sample and what its row lacks.
    """
    prompt, tools = sample.prompt, sample.metadata.get("tools")
    try:
        if isinstance(prompt, list) and sample.label is None:
            built = masks.build(prompt, tools)
            tokens, mask = built.token_ids, built.loss_mask
        elif sample.label is not None:
            prompt_ids = encode_prompt(args, tokenizer, prompt, tools)
            response_ids = tokenizer(sample.label + (tokenizer.eos_token or ""), add_special_tokens=False)["input_ids"]
            tokens, mask = prompt_ids + response_ids, [0] * len(prompt_ids) + [1] * len(response_ids)
        else:
            raise ValueError(
                "a string prompt needs a response: set --label-key, or give a list of messages without --apply-chat-template"
            )
        if 1 not in mask:
            raise ValueError("no token of it would be trained")
    except ValueError as error:
        raise ValueError(f"SFT sample {sample.index}: {error}") from error
    first = max(mask.index(1), 1)
    limit = getattr(args, "rollout_max_context_len", None)
    if limit and len(tokens) > limit:
        raise ValueError(
            f"SFT sample {sample.index}: {len(tokens)} tokens, --rollout-max-context-len is {limit}; shorten it or raise the limit"
        )
    sample.tokens, sample.loss_mask, sample.response_length = tokens, mask[first:], len(tokens) - first
    sample.response = tokenizer.decode(tokens[first:])
    sample.reward, sample.status = 0.0, SampleStatus.COMPLETED


def _fill_batch(args: Any, groups: list[list[Sample]]) -> None:
    tokenizer = shared_tokenizer(args)
    masks = LossMaskBuilder(tokenizer, getattr(args, "loss_mask_type", "qwen"), chat_template_kwargs(args))
    for group in groups:
        for sample in group:
            fill_sample(args, tokenizer, masks, sample)


async def generate_rollout(
    args: Any, rollout_id: int, data_source: DataSource, evaluation: bool = False
) -> RolloutFnTrainOutput:
    """The `--rollout-function-path` for SFT: the next `--rollout-batch-size` rows, tokenised and masked."""
    if evaluation:
        raise ValueError("SFT has no evaluation of its own: set --eval-function-path, or drop --eval-interval")
    groups = data_source.get_samples(args.rollout_batch_size)
    await asyncio.to_thread(_fill_batch, args, groups)
    return RolloutFnTrainOutput(samples=groups)
