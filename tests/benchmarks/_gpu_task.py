"""What the GPU benchmarks train on: a Qwen3-0.6B-shaped model with random weights, a real tokenizer, and checkable tasks.

The task: "Reverse: d a f" wants "f a d"; the reward is the share of letters in their place. Seven of ten demonstrations of the warm
start just echo the letters, so that it leaves something for RL to find out.
"""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

LETTERS, LENGTH = "abcdefgh", 3
ECHO_SHARE = 0.7

SHAPES: dict[str, dict[str, Any]] = {
    "qwen3-0.6b": dict(
        hidden_size=1024, intermediate_size=3072, num_hidden_layers=28, num_attention_heads=16, num_key_value_heads=8,
        head_dim=128, rope_theta=1e6,
    ),
    "tiny": dict(
        hidden_size=128, intermediate_size=256, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        head_dim=32, rope_theta=1e4,
    ),
}  # fmt: skip


def make_model(folder: Path, tokenizer_dir: Path, shape: str, seed: int = 0, dtype: str = "bfloat16") -> Path:
    """A random model of `shape` with the tokenizer of `tokenizer_dir`, as a Hugging Face directory."""
    import torch
    from transformers import AutoTokenizer, GenerationConfig, Qwen3Config, Qwen3ForCausalLM

    tokenizer = AutoTokenizer.from_pretrained(tokenizer_dir)
    torch.manual_seed(seed)
    ids = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    config = Qwen3Config(
        vocab_size=-(-len(tokenizer) // 64) * 64, max_position_embeddings=4096, tie_word_embeddings=True,
        bos_token_id=None, dtype=dtype, **ids, **SHAPES[shape],
    )  # fmt: skip
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        model = Qwen3ForCausalLM(config).to(getattr(torch, dtype))
    model.generation_config = GenerationConfig(**ids)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def question(word: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": f"Reverse: {' '.join(word)}"}]


def make_tasks(folder: Path, rows: int, seed: int = 0) -> None:
    """`sft.jsonl` (demonstrations) and `train.jsonl` (prompts and answers) below `folder`."""
    rng = random.Random(seed)
    folder.mkdir(parents=True, exist_ok=True)
    words = ["".join(rng.choice(LETTERS) for _ in range(LENGTH)) for _ in range(rows)]
    demonstrations = [
        {"input": question(w), "label": " " + " ".join(w if rng.random() < ECHO_SHARE else w[::-1])} for w in words
    ]
    prompts = [{"input": question(w), "label": " ".join(w[::-1])} for w in words]
    for name, data in (("sft", demonstrations), ("train", prompts)):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in data))


async def letters_in_place(args: Any, sample: Any, **kwargs: Any) -> float:
    """`--custom-rm-path`: the share of the answer's letters that stand where they should; 0 for another number of letters."""
    wanted, got = sample.label.split(), sample.response.split()
    return sum(a == b for a, b in zip(wanted, got, strict=True)) / len(wanted) if len(wanted) == len(got) else 0.0


async def even_share(args: Any, sample: Any, **kwargs: Any) -> float:
    """`--custom-rm-path`: the share of response tokens with an even id; something that answers of any length differ in."""
    response = sample.tokens[len(sample.tokens) - sample.response_length :]
    return sum(token % 2 == 0 for token in response) / max(len(response), 1)
