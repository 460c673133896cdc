"""Seconds per step of TRL's `GRPOTrainer`; run by `trl_step` with the interpreter of TRL's own environment.

    python _trl_worker.py '{"model": DIR, "rows": FILE, "prompts": 8, "samples": 8, "tokens": 64, "steps": 6, "warmup": 2}'

One process, fp32, no gradient checkpointing, no reference model, end-of-sequence suppressed so that every response is full length.
Its last line is a JSON list: the seconds of each step after the warm-up.
"""

from __future__ import annotations

import itertools
import json
import sys
import tempfile
import time
from typing import Any


def read_prompts(path: str, count: int) -> list[dict[str, Any]]:
    with open(path, encoding="utf-8") as f:
        rows = [json.loads(line) for line in f]
    return [{"prompt": rows[i % len(rows)]["input"], "label": rows[i % len(rows)]["label"]} for i in range(count)]


def letters_in_place(completions: list[Any], label: list[str], **_: Any) -> list[float]:
    """A reward as cheap as ours is: the share of the label's characters that stand where they should."""
    texts = [c[0]["content"] for c in completions]
    return [
        sum(a == b for a, b in zip(t, want, strict=False)) / max(len(want), 1)
        for t, want in zip(texts, label, strict=True)
    ]


def main(job: dict[str, Any]) -> list[float]:
    import torch
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    torch.set_num_threads(job["threads"])
    tokenizer = AutoTokenizer.from_pretrained(job["model"])
    model = AutoModelForCausalLM.from_pretrained(job["model"], dtype=torch.float32)

    class Clock(TrainerCallback):
        """The time from one step's start to the next one's, so that nothing between them is left out."""

        starts: list[float] = []

        def on_step_begin(self, *_: Any, **__: Any) -> None:
            self.starts.append(time.perf_counter())

    steps = job["warmup"] + job["steps"]
    with tempfile.TemporaryDirectory() as folder:
        config = GRPOConfig(
            output_dir=folder,
            max_steps=steps + 1,
            per_device_train_batch_size=job["prompts"] * job["samples"],
            gradient_accumulation_steps=1,
            num_generations=job["samples"],
            max_completion_length=job["tokens"],
            temperature=1.0,
            beta=0.0,
            learning_rate=1e-5,
            bf16=False,
            fp16=False,
            use_cpu=True,
            gradient_checkpointing=False,
            generation_kwargs={"suppress_tokens": [tokenizer.eos_token_id]},
            report_to=[],
            save_strategy="no",
            logging_strategy="steps",
            logging_steps=1,
            disable_tqdm=True,
        )
        trainer = GRPOTrainer(
            model=model,
            reward_funcs=letters_in_place,
            args=config,
            train_dataset=Dataset.from_list(read_prompts(job["rows"], job["prompts"] * (steps + 1))),
            processing_class=tokenizer,
            callbacks=[Clock],
        )
        trainer.train()
    lengths = [row["completions/mean_length"] for row in trainer.state.log_history if "completions/mean_length" in row]
    if any(length != job["tokens"] for length in lengths):
        raise SystemExit(f"responses of {lengths} tokens, wanted {job['tokens']}: the work is not the same")
    starts = Clock.starts[job["warmup"] :]
    return [later - earlier for earlier, later in itertools.pairwise(starts)]


if __name__ == "__main__":
    seconds = main(json.loads(sys.argv[1]))
    print(json.dumps(seconds))
