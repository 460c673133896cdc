from __future__ import annotations

import pytest

from tests.fast.rollout.fakes import make_args, prompt_rows, write_jsonl, write_tokenizer


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory):
    return write_tokenizer(tmp_path_factory.mktemp("model"))


@pytest.fixture
def run_args(model_dir, tmp_path):
    """Arguments of a small run over `count` prompts."""

    def build(count: int = 20, **overrides):
        data = write_jsonl(tmp_path / "prompts.jsonl", prompt_rows(count))
        return make_args(model_dir, **{"prompt_data": data, **overrides})

    return build
