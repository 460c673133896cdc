"""A complete set of arguments that breaks no rule, to be broken one flag at a time."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from miles.arguments import Args, ArgumentsError, make_args
from miles.backends.training_utils.checkpoint import CheckpointStore

CONFIG = {
    "model_type": "qwen3",
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "intermediate_size": 64,
    "vocab_size": 320,
    "rms_norm_eps": 1e-6,
    "rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"},
    "tie_word_embeddings": False,
    "hidden_act": "silu",
    "attention_dropout": 0.0,
    "max_position_embeddings": 2048,
}


def write_model(directory: Path, **config: Any) -> Path:
    """A directory that passes for a Hugging Face model as long as nobody loads it."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(CONFIG | config))
    (directory / "tokenizer.json").write_text("{}")
    (directory / "tokenizer_config.json").write_text(json.dumps({"chat_template": "{{ messages }}"}))
    (directory / "model.safetensors").write_bytes(struct.pack("<Q", 2) + b"{}")
    return directory


def write_checkpoint(root: Path, rollout_id: int = 3, **recorded: Any) -> Path:
    """A finished checkpoint of the FSDP trainer in `root`, as far as startup looks at it. Returns its folder."""
    store = CheckpointStore(root)
    identity = {"config": CONFIG, "tensors": {}, "hf_checkpoint": "/models/first"} | recorded
    (store.begin(rollout_id) / "model.json").write_text(json.dumps(identity))
    return store.commit(rollout_id)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return write_model(tmp_path / "model")


@pytest.fixture
def fields(tmp_path: Path, model: Path) -> dict[str, Any]:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"input": "1 + 1 =", "label": "2"}\n')
    return {
        "hf_checkpoint": str(model),
        "prompt_data": str(prompts),
        "rm_type": "deterministic_random",
        "rollout_batch_size": 4,
        "n_samples_per_prompt": 2,
        "num_rollout": 3,
        "rollout_num_gpus": 1,
        "actor_num_gpus_per_node": 2,
        "run_dir": str(tmp_path / "run"),
        "train_device": "cpu",
    }


@pytest.fixture
def make(fields: dict[str, Any]) -> Callable[..., Args]:
    """`make(**changes)` -> Args, checked; a change to None takes the field away."""

    def build(driver: str | None = None, **changes: Any) -> Args:
        merged = {k: v for k, v in (fields | changes).items() if v is not None}
        return make_args(driver=driver, **merged)

    return build


@pytest.fixture
def problems(make: Callable[..., Args]) -> Callable[..., list[str]]:
    """`problems(**changes)` -> what the rules say about it."""

    def find(**changes: Any) -> list[str]:
        try:
            make(**changes)
        except ArgumentsError as error:
            return error.problems
        return []

    return find


@pytest.fixture
def command(fields: dict[str, Any]) -> Callable[..., list[str]]:
    """`command("--a", "b")` -> a valid command line with more flags at its end."""

    def build(*more: str) -> list[str]:
        line: list[str] = []
        for name, value in fields.items():
            line += ["--" + name.replace("_", "-"), str(value)]
        return [*line, *more]

    return build
