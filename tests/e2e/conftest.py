"""One tiny model and one dataset for all end-to-end tests, and the flags of a small run on them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.e2e.harness import Run
from tests.helpers.tiny_models import make_tiny_model


def pytest_collection_modifyitems(items):
    for item in items:
        if item.path.is_relative_to(Path(__file__).parent):
            item.add_marker(pytest.mark.e2e)
            item.add_marker(pytest.mark.timeout(900))


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="session")
def prompts(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("data") / "prompts.jsonl"
    rows = [{"input": f"How many apples are {i} and {i + 1}?", "label": str(2 * i + 1)} for i in range(24)]
    path.write_text("\n".join(map(json.dumps, rows)) + "\n")
    return path


@pytest.fixture
def flags(model_dir, prompts):
    """Command line of a 3-step GRPO run, as a dict to change: `None` removes a flag, `True` is a switch."""

    def build(**changes) -> list[str]:
        base = {
            "hf_checkpoint": model_dir,
            "prompt_data": prompts,
            "rollout_engine": "embedded",
            "train_backend": "fsdp",
            "actor_num_gpus_per_node": 2,
            "rollout_num_gpus": 1,
            "num_rollout": 3,
            "rollout_batch_size": 4,
            "n_samples_per_prompt": 4,
            "global_batch_size": 16,
            "rollout_max_response_len": 12,
            "rollout_temperature": 1.0,
            "custom_rm_path": "tests.helpers.rewards.even_token_share",
            "lr": 0.01,
        } | changes
        argv: list[str] = []
        for name, value in base.items():
            if value is None or value is False:
                continue
            argv.append("--" + name.replace("_", "-"))
            if value is not True:
                argv.extend(map(str, value if isinstance(value, list | tuple) else [value]))
        return argv

    return build


@pytest.fixture
def launch(tmp_path):
    """Start a driver; every run that a test starts is ended with the test."""
    runs: list[Run] = []

    def start(argv: list[str], name: str = "run", driver: str = "train.py", env: dict | None = None) -> Run:
        run = Run(argv, tmp_path / name, driver, env)
        runs.append(run)
        return run

    yield start
    for run in runs:
        run.__exit__()
