"""A made-up SGLang: what is asked of an interpreter, and how its server is told things, needs no real one."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from miles.backends.sglang_utils.installation import Installation, Option


def make_installation(**changes) -> Installation:
    options = {
        "--model-path": ("model_path", 1, None),
        "--host": ("host", 1, None),
        "--port": ("port", 1, None),
        "--config": ("config", 1, None),
        "--tensor-parallel-size": ("tp_size", 1, None),
        "--tp-size": ("tp_size", 1, None),
        "--cuda-graph-max-bs": ("cuda_graph_max_bs", 1, None),  # an older name
        "--attention-backend": ("attention_backend", 1, ("torch_native", "fa3")),
        "--disable-radix-cache": ("disable_radix_cache", 0, None),
        "--ple-offload-embedding": ("ple_offload_embedding", 0, None),
        "--no-ple-offload-embedding": ("ple_offload_embedding", 0, None),
        "--lora-paths": ("lora_paths", "many", None),
        "--device": ("device", 1, None),
        "--watchdog-timeout": ("watchdog_timeout", 1, None),
    } | changes
    table = {spelling: Option(spelling, *rest) for spelling, rest in options.items()}
    return Installation("/env/bin/python", "0.5.99", table)


@pytest.fixture
def installation() -> Installation:
    return make_installation()


def flags(**fields) -> SimpleNamespace:
    """Arguments of a run; every flag that is not given is None, as in a real one."""
    return SimpleNamespace(**fields)
