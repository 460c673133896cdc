"""Every recipe for GPUs resolves on a machine without any: the right placement, the right batch equation, flags that win."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from miles.arguments import systems
from miles.arguments.parse import parse_args
from miles.arguments.plan import build_plan
from miles.launch.options import parse
from tests.fast.arguments.conftest import write_model

REPO = Path(__file__).resolve().parents[3]
RECIPES = sorted(p for p in (REPO / "recipes").glob("qwen3_*.sh"))


@pytest.fixture
def plan_of(tmp_path, monkeypatch):
    """The plan that a recipe's own command line gives, by way of a stand-in for the interpreter that it starts."""
    monkeypatch.setenv("RAY_ADDRESS", "head:6379")  # as the launcher sets it
    for system in ("sglang-gpu", "offload"):
        monkeypatch.setitem(systems.SYSTEMS, system, (system, True))
    interpreter = tmp_path / "python"
    interpreter.write_text('#!/bin/bash\nprintf "%s\\0" "$@" > "$0.words"\n')
    interpreter.chmod(0o755)
    data = tmp_path / "data.jsonl"
    data.write_text('{"prompt": "1 + 1", "label": "2"}\n')
    env = {"MILES_SCRIPT_PYTHON": str(interpreter), "MILES_SCRIPT_DATA": str(data)}
    env["MILES_SCRIPT_MODEL"] = str(write_model(tmp_path / "model"))

    def plan(recipe: Path, *flags: str, **more: str) -> tuple[dict, str]:
        done = subprocess.run(
            ["bash", str(recipe), *flags], env=os.environ | env | more, capture_output=True, text=True, timeout=60, check=False
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        script, *words = Path(f"{interpreter}.words").read_text().split("\0")[:-1]
        assert script == "scripts/launch.py"
        monkeypatch.delenv("RAY_ADDRESS")
        options = parse(words)
        monkeypatch.setenv("RAY_ADDRESS", "head:6379")
        driver = Path(options.driver).name
        return build_plan(parse_args(options.driver_flags, driver=driver)), driver

    return plan


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda p: p.stem)
def test_a_recipe_resolves_without_a_gpu(recipe, plan_of):
    plan, driver = plan_of(recipe, "--dry-run")
    processes = plan["placement"]["processes"]
    assert plan["placement"]["needs"] == "8 GPUs"
    assert plan["batch"]["equation"].startswith("32 prompts x 8 samples = 256 = 256 a step x 1 step")
    assert plan["trainer"]["backend"] == "fsdp" and "x sglang, 1 device(s) each" in plan["rollout"]["engine"]
    if "colocated" in recipe.stem:
        assert driver == "train.py"
        assert processes["trainer rank 7"] == "GPU bundle 7"
        assert processes["engine 7"] == "GPU bundle 7, shared with the trainer"
    else:
        assert driver == "train_async.py"
        assert processes["trainer rank 3"] == "GPU bundle 3" and processes["engine 0"] == "GPU bundle 4"
        assert "trainer rank 4" not in processes and "engine 4" not in processes


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda p: p.stem)
def test_flags_that_are_added_win_and_variables_size_it(recipe, plan_of):
    plan, _ = plan_of(
        recipe, "--dry-run", "--rollout-batch-size", "16", "--global-batch-size", "64", MILES_SCRIPT_GPUS="2"
    )
    assert plan["batch"]["equation"].startswith("16 prompts x 8 samples = 128 = 64 a step x 2 steps")
    assert plan["placement"]["needs"] == "2 GPUs"
    assert plan["files"]["written"]["checkpoints"].startswith(str(REPO / "checkpoints" / "qwen3-"))


def test_there_is_a_recipe_for_each_model_and_placement():
    assert {r.stem for r in RECIPES} == {
        f"qwen3_{size}_fsdp_{placement}" for size in ("0_6b", "4b") for placement in ("colocated", "disaggregated")
    }
