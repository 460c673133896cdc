"""Make what the quick start trains on: a tokenizer, a small Qwen3 model with random weights, and generated tasks.

    python scripts/make_quickstart.py [--out build/quickstart] [--seed 0]

Everything is generated here, offline, and is the same for the same seed:

    model/        a Hugging Face directory: about 1 M parameters, Qwen3 architecture, tokenizer with a chat template
    sft.jsonl     {"messages": [user, assistant]}: demonstrations for the warm start
    train.jsonl   {"input": [user], "label": answer, "metadata": {...}}: prompts for RL, answers for the verifier
    eval.jsonl    the same for words that neither of the other two has

The task is reasoning-gym's `spell_backward`: "Spell this word backward (example: sun -> nus): lamp" wants `pmal`, and a
wrong answer earns the share of letters that it has in the right place. The demonstrations are poor on purpose: most just
echo the word. Imitating them well earns about a third of the reward; only RL, which sees rewards and no answers, can
find out which of its habits is the right one and perfect it.
"""

from __future__ import annotations

import argparse
import os
import random
import shutil
import sys
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from make_tasks import rl_row, user, write_jsonl

TASK = "spell_backward"
TASK_CONFIG = {"min_word_len": 3, "max_word_len": 5}
ECHO_SHARE = 0.7  # of the demonstrations
END_OF_TEXT, TURN, END_OF_TURN = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


# ---- tasks -------------------------------------------------------------------------------------------------------


def task_entries(seed: int, without: set[str]) -> Iterator[dict[str, Any]]:
    """Endless reasoning-gym entries (`question`, `answer`, `metadata`) whose word is not in `without`."""
    import reasoning_gym

    dataset = reasoning_gym.create_dataset(TASK, seed=seed, size=10**9, **TASK_CONFIG)
    for index in range(10**9):
        entry = dataset[index]
        if entry["metadata"]["word"].lower() not in without:
            yield entry


def take(entries: Iterator[dict[str, Any]], count: int) -> list[dict[str, Any]]:
    return [next(entries) for _ in range(count)]


def sft_row(entry: dict[str, Any], rng: random.Random) -> dict[str, Any]:
    """A demonstration: the right answer, or (`ECHO_SHARE` of the time) the word as it was given."""
    answer = entry["metadata"]["word"] if rng.random() < ECHO_SHARE else entry["answer"]
    return {"messages": [user(entry["question"]), {"role": "assistant", "content": answer}]}


# ---- tokenizer and model -----------------------------------------------------------------------------------------


def train_tokenizer(texts: Iterable[str], min_count: int) -> Any:
    """A byte-level tokenizer whose vocabulary is learned: a word seen `min_count` times is one token, others are bytes.

    So the instruction is a dozen tokens, while the word to spell keeps one token a letter.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    counts = Counter(word for text in texts for word, _ in words.pre_tokenize_str(text))
    frequent = sorted(word for word, count in counts.items() if count >= min_count and len(word) > 1)
    roles = ["system", "user", "assistant"]
    tokens = [END_OF_TEXT, TURN, END_OF_TURN, *sorted(words.alphabet()), *dict.fromkeys([*roles, *frequent])]
    vocab = {token: index for index, token in enumerate(tokens)}

    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[], ignore_merges=True))
    tokenizer.pre_tokenizer, tokenizer.decoder = words, decoders.ByteLevel()
    tokenizer.add_special_tokens([END_OF_TEXT, TURN, END_OF_TURN])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=END_OF_TURN,
        pad_token=END_OF_TEXT,
        chat_template=CHAT_TEMPLATE,
        model_max_length=512,
        clean_up_tokenization_spaces=False,
    )


def make_model(tokenizer: Any, seed: int) -> Any:
    """A Qwen3 with random weights, tied embeddings and fp32 parameters, sized for a laptop."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=-(-len(tokenizer) // 64) * 64,
        hidden_size=128,
        intermediate_size=512,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=512,
        tie_word_embeddings=True,
        rope_theta=10000.0,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=None,
        dtype="float32",
    )
    return Qwen3ForCausalLM(config)


def save_model(model: Any, tokenizer: Any, folder: Path) -> None:
    """Write the Hugging Face directory, and check that what will be loaded from it is what was made."""
    from transformers import AutoTokenizer
    from transformers.utils import logging

    logging.disable_progress_bar()
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    probe = [user("Spell this word backward: lamp"), {"role": "assistant", "content": "pmal"}]
    loaded = AutoTokenizer.from_pretrained(folder)
    made, found = (t.apply_chat_template(probe, tokenize=True, return_dict=False) for t in (tokenizer, loaded))
    if made != found:
        raise RuntimeError(f"the tokenizer in {folder} does not load as it was saved: {found} instead of {made}")


# ---- the folder --------------------------------------------------------------------------------------------------


def make_assets(folder: Path, seed: int, sft_rows: int, train_rows: int, eval_rows: int) -> None:
    """Fill `folder`, which must not exist, and say what is in it."""
    evaluation = take(task_entries(seed + 2_000_000_000, without=set()), eval_rows)
    held_out = {entry["metadata"]["word"].lower() for entry in evaluation}
    demonstrations = take(task_entries(seed, held_out), sft_rows)
    prompts = take(task_entries(seed + 1_000_000_000, held_out), train_rows)

    rng = random.Random(seed)
    folder.mkdir(parents=True)
    write_jsonl(folder / "sft.jsonl", (sft_row(entry, rng) for entry in demonstrations))
    write_jsonl(folder / "train.jsonl", (rl_row(TASK, entry) for entry in prompts))
    write_jsonl(folder / "eval.jsonl", (rl_row(TASK, entry) for entry in evaluation))

    tokenizer = train_tokenizer((entry["question"] for entry in demonstrations), min_count=max(1, sft_rows // 20))
    model = make_model(tokenizer, seed)
    save_model(model, tokenizer, folder / "model")
    parameters = sum(p.numel() for p in model.parameters())
    print(f"a model of {parameters:,} parameters, a tokenizer of {len(tokenizer)} tokens")
    print(f"{sft_rows} demonstrations, {train_rows} prompts, {eval_rows} held out")


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("build/quickstart"))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--sft-rows", type=int, default=9600)
    parser.add_argument("--train-rows", type=int, default=4096)
    parser.add_argument("--eval-rows", type=int, default=128)
    args = parser.parse_args(argv)
    if args.out.exists():
        print(f"{args.out} is there already; remove it to make it anew")
        return 0
    unfinished = args.out.with_name(f".{args.out.name}.{os.getpid()}.tmp")
    try:
        make_assets(unfinished, args.seed, args.sft_rows, args.train_rows, args.eval_rows)
        unfinished.rename(args.out)
        print(f"made {args.out}")
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
