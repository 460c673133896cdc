"""The shell scripts: what they say when something is missing, and what recipes ask for."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

REPO = Path(__file__).resolve().parents[3]
RECIPES = sorted((REPO / "recipes").glob("*.sh"))
SHELL = sorted((REPO / "scripts").glob("*.sh")) + sorted((REPO / "recipes").rglob("*.sh")) + [REPO / ".ci" / "run"]


def bash(script: str, **env: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        ["bash", "-c", script], cwd=REPO, env=os.environ | env, capture_output=True, text=True, timeout=240, check=False
    )


@pytest.mark.parametrize("script", SHELL, ids=lambda p: p.name)
def test_shell_scripts_parse(script):
    done = subprocess.run(["bash", "-n", str(script)], capture_output=True, text=True, timeout=20, check=False)
    assert done.returncode == 0, done.stderr


def test_an_interpreter_that_is_too_old_or_missing_is_named(tmp_path):
    old = tmp_path / "python-old"
    old.write_text("#!/bin/sh\nexit 1\n")
    old.chmod(0o755)
    done = bash("source scripts/venv.sh; find_python", PYTHON=str(old))
    assert done.returncode != 0
    assert "Python 3.11 or newer is needed" in done.stderr and "PYTHON=" in done.stderr


def test_the_interpreter_that_was_asked_for_is_taken():
    done = bash("source scripts/venv.sh; find_python", PYTHON=sys.executable)
    assert done.stdout.strip() == sys.executable


def test_a_failed_installation_ends_the_script_and_shows_why(tmp_path):
    venv = tmp_path / "venv"
    (venv / "bin").mkdir(parents=True)
    python = venv / "bin" / "python"
    python.write_text("#!/bin/sh\necho 'no matching distribution for torch' >&2\nexit 1\n")
    python.chmod(0o755)
    done = bash(f"source scripts/venv.sh; ensure_venv {venv} cpu; echo went on")
    assert done.returncode != 0 and "went on" not in done.stdout
    assert "no matching distribution for torch" in done.stderr and str(venv / "install.log") in done.stderr
    assert not (venv / "miles-installed").exists()


def test_an_installation_is_not_repeated_until_something_changes(tmp_path):
    venv = tmp_path / "venv"
    (venv / "bin").mkdir(parents=True)
    python = venv / "bin" / "python"
    python.write_text(f"#!/bin/sh\necho ran >> {tmp_path}/calls\n")
    python.chmod(0o755)
    done = bash(f"source scripts/venv.sh; for e in cpu cpu cpu,dev cpu; do ensure_venv {venv} $e; done")
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "calls").read_text().count("ran") == 2


LABELS = ("fully gated", "proxy gated", "verified", "not verified")


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda p: p.name)
def test_recipes_say_how_well_they_are_known_to_work(recipe):
    """By one of four labels; a gated one names the test that gates it, and that has to be there."""
    (evidence,) = re.findall(r"Evidence: (.*)", recipe.read_text())
    label = next((each for each in LABELS if evidence.startswith(each)), None)
    assert label, evidence
    if label.endswith("gated"):
        (test,) = re.findall(r"tests/\S+\.py", evidence)
        assert (REPO / test).is_file(), test
    assert recipe.read_text().rstrip().endswith('"$@"'), "extra flags come last, so that they win"


def test_the_quick_start_tells_mistakes_and_its_plan_before_the_warm_start(tmp_path):
    env = {"MILES_SCRIPT_PYTHON": sys.executable, "MILES_SCRIPT_ASSETS": str(tmp_path / "assets")}
    planned = bash("bash recipes/quickstart.sh --dry-run", **env)
    assert planned.returncode == 0, planned.stderr
    assert "32 prompts x 8 samples" in planned.stdout and "warm start" not in planned.stdout
    wrong = bash("bash recipes/quickstart.sh --num-rolout 3", **env)
    assert wrong.returncode == 2 and "--num-rollout" in wrong.stderr and "warm start" not in wrong.stdout
    assert not (tmp_path / "assets" / "warm-start").exists()
