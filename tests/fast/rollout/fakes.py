"""A small tokenizer on disk, and an engine pool that runs in the test's own process."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from miles.utils.seeds import derive_seed

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
VOCAB = 300


def write_tokenizer(directory: Path, template: str | None = CHATML, max_positions: int | None = 512) -> Path:
    """A byte-level BPE tokenizer with chat tokens, and a `config.json` beside it."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    core = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core, eos_token="<|im_end|>", additional_special_tokens=["<|im_start|>"]
    )
    tokenizer.chat_template = template
    tokenizer.save_pretrained(directory)
    config = {"num_hidden_layers": 2, "num_experts_per_tok": 2, "num_experts": 8, "mlp_only_layers": [0]}
    if max_positions:
        config["max_position_embeddings"] = max_positions
    (directory / "config.json").write_text(json.dumps(config))
    return directory


def make_args(model_dir: Path | str, **overrides: Any) -> SimpleNamespace:
    fields: dict[str, Any] = {
        "hf_checkpoint": str(model_dir),
        "prompt_data": None,
        "input_key": "input",
        "label_key": "label",
        "metadata_key": "metadata",
        "tool_key": "tools",
        "apply_chat_template": False,
        "rollout_global_dataset": True,
        "rollout_shuffle": False,
        "rollout_seed": 42,
        "rollout_batch_size": 4,
        "n_samples_per_prompt": 2,
        "over_sampling_batch_size": None,
        "rollout_temperature": 1.0,
        "rollout_top_p": 1.0,
        "rollout_top_k": -1,
        "rollout_max_response_len": 8,
        "rollout_max_context_len": None,
        "global_batch_size": 8,
        "max_sample_retries": 2,
        "max_failed_group_ratio": 0.5,
        "advantage_estimator": "grpo",
        "disable_rewards_normalization": False,
        "rewards_normalization": True,
        "grpo_std_normalization": True,
        "reward_key": None,
        "rm_type": None,
        "reward_timeout": 30.0,
        "reward_num_workers": 1,
        "group_rm": False,
        "custom_rm_path": "tests.fast.rollout.fakes.even_share",
        "save": None,
        "load": None,
    }
    return SimpleNamespace(**{**fields, **overrides})


async def even_share(args: Any, sample: Any, **kwargs: Any) -> Any:
    """Share of even token ids in the response; a list of them for a list of samples."""
    if isinstance(sample, list):
        return [await even_share(args, one) for one in sample]
    response = sample.tokens[-sample.response_length :]
    return sum(token % 2 == 0 for token in response) / len(response)


class FakePool:
    """Tokens are a pure function of seed and position, as on an engine that is batch-invariant.

    Args:
        length: response tokens of a request, from its payload; the rest of `max_new_tokens` is not used.
        delay: seconds a token takes, from the payload.
        before: called with each payload; may raise, as an engine that fails.
    """

    def __init__(
        self,
        *,
        length: Callable[[dict], int] = lambda payload: 5,
        delay: Callable[[dict], float] = lambda payload: 0.0,
        before: Callable[[dict], None] = lambda payload: None,
        version: int = 1,
        spans: bool = True,
    ) -> None:
        self.length, self.delay, self.before = length, delay, before
        self.version, self.spans = version, spans
        self.requests: list[dict] = []
        self.answered: list[dict] = []
        self.aborts = 0

    async def abort_all(self) -> None:
        self.aborts += 1

    async def generate(self, payload: dict, routing_key: str | None = None) -> dict:
        self.requests.append(payload)
        self.before(payload)
        params, start = payload["sampling_params"], len(payload["input_ids"])
        aborts, version = self.aborts, self.version
        tokens: list[int] = []
        reason: dict[str, Any] = {"type": "stop", "matched": 1}
        for position in range(start, start + self.length(payload)):
            pause = self.delay(payload)
            if pause:
                await asyncio.sleep(pause)
            if self.aborts > aborts:
                reason = {"type": "abort", "message": "aborted"}
                break
            if len(tokens) == params["max_new_tokens"]:
                reason = {"type": "length", "length": len(tokens)}
                break
            tokens.append(derive_seed(params.get("sampling_seed", 0), position) % 250)
        self.answered.append(payload)
        return answer(tokens, start, reason, version, self.spans)


def answer(tokens: list[int], prompt: int, reason: dict, version: int = 1, spans: bool = True) -> dict:
    """A `/generate` answer as engines shape it."""
    meta: dict[str, Any] = {
        "finish_reason": reason,
        "prompt_tokens": prompt,
        "completion_tokens": len(tokens),
        "cached_tokens": 0,
        "weight_version": str(version),
        "output_token_logprobs": [[-0.5 - token / 1000, token, None] for token in tokens],
    }
    if spans:
        meta["weight_versions"] = [{"version": str(version), "start": 0, "end": len(tokens)}]
    return {"text": "".join(map(chr, (65 + t % 26 for t in tokens))), "output_ids": tokens, "meta_info": meta}


def write_jsonl(path: Path, rows: list[dict]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def prompt_rows(count: int) -> list[dict]:
    return [{"input": f"question {i}", "label": str(i)} for i in range(count)]
