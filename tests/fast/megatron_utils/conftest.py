"""Worlds that the tests of a file share. megatron-core is adapted to the CPU in their processes, never in pytest's.

Not longer than a file: what megatron-core keeps of models of experts keeps their process groups, and those have threads.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.helpers.gloo_world import World
from tests.helpers.tiny_models import make_tiny_model


@pytest.fixture(scope="module")
def pair() -> Iterator[World]:
    with World(2, timeout_s=240) as world:
        yield world


@pytest.fixture(scope="module")
def quad() -> Iterator[World]:
    with World(4, timeout_s=280, may_fork=True) as world:
        yield world


@pytest.fixture(scope="module")
def unadapted() -> Iterator[World]:
    """One rank for the FSDP trainer: transformers does not load models right where torch is adapted to megatron-core."""
    with World(1, timeout_s=240) as world:
        yield world


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Model directories by name, of two layers or, `deep`, of four."""
    root = tmp_path_factory.mktemp("models")
    made = {family: make_tiny_model(root / family, family) for family in ("qwen2", "qwen3", "qwen3_moe")}
    made["qwen3_deep"] = make_tiny_model(root / "deep", "qwen3", num_hidden_layers=4)
    return {name: str(path) for name, path in made.items()}
