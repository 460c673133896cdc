"""Flags that user functions register for themselves."""

from __future__ import annotations

import sys
import textwrap

import pytest

from miles.arguments import parse_args
from miles.utils.imports import register_function


async def generate(input):
    return input


def _register(parser):
    parser.add_argument("--my-rounds", type=int, default=3)
    parser.add_argument("--max-seq-len", type=int, default=99)


generate.add_arguments = _register  # type: ignore[attr-defined]
PATH = f"{__name__}.generate"


@pytest.fixture(autouse=True)
def _registered():
    register_function(PATH, generate)


def test_a_generate_function_adds_flags(command):
    args = parse_args(command("--custom-generate-function-path", PATH, "--my-rounds", "5"))
    assert args.my_rounds == 5
    assert args.to_dict()["my_rounds"] == 5


def test_a_flag_that_is_not_given_has_the_functions_default(command):
    assert parse_args(command(f"--custom-generate-function-path={PATH}")).my_rounds == 3


def test_a_flag_that_exists_already_keeps_its_meaning(command):
    args = parse_args(command("--custom-generate-function-path", PATH))
    assert args.max_seq_len is None


def test_without_the_function_its_flags_are_unknown(command, capsys):
    with pytest.raises(SystemExit):
        parse_args(command("--my-rounds", "5"))
    assert "unknown flag --my-rounds" in capsys.readouterr().err


def test_a_failing_add_arguments_is_named(command, capsys, tmp_path, monkeypatch):
    (tmp_path / "broken_hook.py").write_text(
        textwrap.dedent("""
            async def generate(input): ...
            def register(parser): raise RuntimeError("no")
            generate.add_arguments = register
        """)
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(SystemExit):
        parse_args(command("--custom-generate-function-path", "broken_hook.generate"))
    assert "broken_hook.generate.add_arguments failed: RuntimeError: no" in capsys.readouterr().err
    sys.modules.pop("broken_hook", None)


def test_a_wrong_value_of_an_added_flag_is_refused(command, capsys):
    with pytest.raises(SystemExit):
        parse_args(command("--custom-generate-function-path", PATH, "--my-rounds", "x"))
    assert "--my-rounds: invalid int value" in capsys.readouterr().err
