"""`scripts/chat.py` as its user runs it: a model directory, an engine of its own, an answer."""

import subprocess
import sys
from pathlib import Path

from tests.helpers.tiny_models import make_tiny_model

CHAT = Path(__file__).resolve().parents[3] / "scripts" / "chat.py"


def chat(*arguments: object, stdin: str = "") -> subprocess.CompletedProcess:
    command = [sys.executable, str(CHAT), *map(str, arguments)]
    return subprocess.run(command, input=stdin, capture_output=True, text=True, timeout=240, check=False)


def test_one_message_gets_the_same_answer_as_the_first_of_a_conversation(tmp_path):
    model = make_tiny_model(tmp_path / "model")
    once = chat(model, "--max-tokens", 8, "hello")
    assert once.returncode == 0, once.stderr
    assert once.stdout.removesuffix("\n"), "a random model says something, if nothing sensible"
    talk = chat(model, "--max-tokens", 8, stdin="hello\nagain\n")
    assert talk.returncode == 0, talk.stderr
    answers = talk.stdout.split("you: ")[1:-1]
    assert len(answers) == 2 and answers[0].removeprefix("model: ") == once.stdout


def test_what_is_no_model_is_told_before_an_engine_starts(tmp_path):
    done = chat(tmp_path, "hello")
    assert done.returncode == 2 and "has no config.json" in done.stderr


def test_an_engine_that_does_not_start_ends_with_its_own_words(tmp_path):
    (tmp_path / "config.json").write_text('{"architectures": ["Nonsense"]}')
    done = chat(tmp_path, "hello")
    assert done.returncode == 1 and "Nonsense" in done.stderr, done.stderr
