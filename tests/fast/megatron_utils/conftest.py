"""Worlds that the Megatron tests share. megatron-core is adapted to the CPU in their processes, never in pytest's."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.helpers.gloo_world import World


@pytest.fixture(scope="session")
def pair() -> Iterator[World]:
    with World(2, timeout_s=240) as world:
        yield world


@pytest.fixture(scope="session")
def quad() -> Iterator[World]:
    with World(4, timeout_s=240) as world:
        yield world
