"""Tiny random Hugging Face directories with a real tokenizer, for tests that need a model but no training.

`make_tiny_model(tmp_path)` takes about 50 ms. Weights are random but equal for equal arguments.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

FAMILIES = ("qwen3", "qwen2", "llama", "qwen3_moe")

CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
_TEXTS = (
    "system user assistant What is the sum of two numbers? The answer is 42.",
    "Question: how many apples are left? Answer: there are 7 apples left, and 3 pears.",
    "0 1 2 3 4 5 6 7 8 9 10 11 12 + - * / = ( ) yes no true false",
)


def make_tokenizer() -> Any:
    """A byte-level BPE tokenizer of at most 320 tokens: every text round-trips, special tokens are single ids."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=320,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_TEXTS, trainer)
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|im_end|>", pad_token="<|endoftext|>")
    fast.chat_template = CHAT_TEMPLATE
    return fast


def tiny_config(family: str, vocab: int, **overrides: Any) -> Any:
    """The transformers config of a two-layer model; `overrides` are its own fields."""
    import transformers

    fields: dict[str, Any] = {
        "vocab_size": vocab,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "max_position_embeddings": 2048,
        "tie_word_embeddings": family == "qwen2",
        "eos_token_id": 2,
        "pad_token_id": 0,
        "bos_token_id": None,
    }
    if family == "qwen2":
        del fields["head_dim"]
    if family == "qwen3_moe":
        fields |= {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "norm_topk_prob": True}
    classes = {"qwen3": "Qwen3Config", "qwen2": "Qwen2Config", "llama": "LlamaConfig", "qwen3_moe": "Qwen3MoeConfig"}
    if family not in classes:
        raise ValueError(f"unknown family {family!r}: choose one of {', '.join(FAMILIES)}")
    return getattr(transformers, classes[family])(**(fields | overrides))


def make_tiny_model(
    directory: str | Path, family: str = "qwen3", *, vocab: int | None = None, seed: int = 0, **config: Any
) -> Path:
    """Write a random model and its tokenizer to `directory`, and return it.

    Args:
        family: `qwen3`, `qwen2` (tied embeddings), `llama` or `qwen3_moe`.
        vocab: rows of the embedding; the tokenizer's size (320) when None, and never below it unless you only
            use token ids.
        config: fields of the transformers config, e.g. `num_hidden_layers=1`.
    """
    import torch
    import transformers

    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    tokenizer = make_tokenizer()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = transformers.AutoModelForCausalLM.from_config(tiny_config(family, vocab or len(tokenizer), **config))
    model.generation_config = transformers.GenerationConfig(eos_token_id=2, pad_token_id=0)
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    return directory
