"""What every generation call shares: tokenizer, engines, concurrency limit, sampling parameters, the abort flag."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import cached_property, lru_cache
from typing import Any

from miles.backends.engine_api.topology import PREFILL, plan_engines
from miles.backends.training_utils.replay.expert_layout import ExpertLayout
from miles.rollout.compat import GenerateFn, load_generate_function
from miles.rollout.prompts import encode_prompt, expert_layout, load_tokenizer, model_context_length
from miles.utils.types import Sample

DEFAULT_GENERATE_PATH = "miles.rollout.generate_hub.single_turn.generate"


def rollout_sampling_params(args: Any) -> dict[str, Any]:
    """Sampling parameters of training rollouts, as the engines' `/generate` takes them."""
    return {
        "temperature": args.rollout_temperature,
        "top_p": args.rollout_top_p,
        "top_k": args.rollout_top_k,
        "max_new_tokens": args.rollout_max_response_len,
        "stop": getattr(args, "rollout_stop", None),
        "stop_token_ids": getattr(args, "rollout_stop_token_ids", None),
        "skip_special_tokens": getattr(args, "rollout_skip_special_tokens", False),
        "no_stop_trim": True,
        "spaces_between_special_tokens": False,
    }


def request_concurrency(args: Any) -> int:
    """Requests in flight over all engines."""
    per_engine = getattr(args, "sglang_server_concurrency", None) or 512
    if getattr(args, "sglang_config", None) is not None:  # sizes differ, and some serve another model
        return per_engine * sum(spec.trained and spec.kind != PREFILL for spec in plan_engines(args))
    gpus = getattr(args, "rollout_num_gpus", None) or 1
    return max(1, per_engine * gpus // (getattr(args, "rollout_num_gpus_per_engine", None) or 1))


class GenerateState:
    """One per rollout function; generate functions get it as `input.state`.

    Attributes:
        args, tokenizer, processor: the run's; `processor` is None for text models.
        engines: the `EnginePool`; `await engines.generate(payload, routing_key)` is the only way to an engine.
        generate_fn_semaphore: bounds generate calls in flight.
        sampling_params: defaults for training rollouts; copy before changing.
        generate_function: the run's generate function.
        context_length, eval_context_length: most tokens in a sequence, None where nobody says.
        aborted: set while a batch is being cut off; generate functions should stop at their next turn.
    """

    def __init__(self, args: Any, engines: Any, *, tokenizer: Any = None, processor: Any = None) -> None:
        self.args = args
        self.engines = engines
        self.tokenizer = load_tokenizer(args) if tokenizer is None else tokenizer
        self.processor = processor
        self.generate_fn_semaphore = asyncio.Semaphore(request_concurrency(args))
        self.sampling_params = rollout_sampling_params(args)
        path = getattr(args, "custom_generate_function_path", None) or DEFAULT_GENERATE_PATH
        self.generate_function: GenerateFn = load_generate_function(path)
        self.context_length = model_context_length(args)
        self.eval_context_length = getattr(args, "eval_max_context_len", None) or self.context_length
        self.aborted = False
        self._overrides: dict[str, GenerateFn] = {}

    def generate_function_for(self, path: str | None) -> GenerateFn:
        """The run's generate function, or the one that a sample names by `generate_function_path`."""
        if path is None:
            return self.generate_function
        if path not in self._overrides:
            self._overrides[path] = load_generate_function(path)
        return self._overrides[path]

    def prompt_ids(self, sample: Sample, tools: list[dict] | None = None) -> list[int]:
        """Token ids of a sample's prompt, a list of the caller's own; the samples of a group are encoded once."""
        if isinstance(sample.prompt, str):
            return list(self._text_ids(sample.prompt))
        return encode_prompt(self.args, self.tokenizer, sample.prompt, tools or sample.metadata.get("tools"))

    @cached_property
    def _text_ids(self) -> Callable[[str], tuple[int, ...]]:
        return lru_cache(maxsize=1024)(lambda text: tuple(encode_prompt(self.args, self.tokenizer, text)))

    @cached_property
    def expert_layout(self) -> ExpertLayout:
        """How the engines report routed experts. Raises: ValueError for a dense model."""
        return expert_layout(self.args)

    def reset(self) -> None:
        self.aborted = False
