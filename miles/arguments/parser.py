"""argparse built from `Flag` objects. argparse counts values only; `values.coerce` types and checks them."""

from __future__ import annotations

import argparse
import difflib
import re
from collections.abc import Iterable, Sequence
from typing import Any, NoReturn

from miles.arguments.flag import Flag
from miles.arguments.values import range_text

_NUMBER = re.compile(r"^-(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?$")


class ArgumentsError(ValueError):
    """Arguments that no run can start from; `problems` lists all that was found, one message each."""

    def __init__(self, problems: Iterable[str]) -> None:
        self.problems = list(problems)
        count = "1 problem" if len(self.problems) == 1 else f"{len(self.problems)} problems"
        super().__init__(f"{count} with the arguments:\n" + "\n".join(f"  - {p}" for p in self.problems))


class FlagParser(argparse.ArgumentParser):
    """A parser without abbreviations that raises instead of exiting.

    User functions get it in `add_arguments(parser)`. An option that exists already keeps its meaning here, so that a
    function that declares, say, `--max-seq-len` for itself works unchanged.
    """

    def __init__(self, flags: Iterable[Flag]) -> None:
        super().__init__(
            prog="miles",
            usage="python train.py [flags]    (or train_async.py)",
            epilog="Options of SGLang's server and router are --sglang-NAME and --router-NAME. The same list: docs/flags.md",
            allow_abbrev=False,
            argument_default=argparse.SUPPRESS,
            formatter_class=_HelpFormatter,
        )
        self._negative_number_matcher = _NUMBER
        self._groups: dict[str, Any] = {}
        self.reused: list[str] = []
        for flag in flags:
            self._add(flag)

    def _add(self, flag: Flag) -> None:
        if flag.group not in self._groups:
            self._groups[flag.group] = super().add_argument_group(flag.group)
        target = self._groups[flag.group]
        text = argparse.SUPPRESS if flag.passed_on else help_text(flag)
        if flag.kind is bool:
            for options, value in ((flag.options, True), (flag.off_options, False)):
                if options:
                    shown = text if value or not flag.options else argparse.SUPPRESS
                    target.add_argument(*options, dest=flag.name, action="store_const", const=value, help=shown)
            return
        kwargs: dict[str, Any] = {"dest": flag.name, "help": text}
        if flag.append:
            kwargs["action"] = "append"
        if flag.nargs == "?":
            kwargs["const"] = (flag.choices or (True,))[0]
        nargs = flag.nargs if flag.nargs is not None else ("+" if flag.many else None)
        if nargs is not None:
            kwargs["nargs"] = nargs
        target.add_argument(*flag.options, metavar=metavar(flag), **kwargs)

    def add_argument(self, *names: Any, **kwargs: Any) -> argparse.Action:
        known = [self._option_string_actions[n] for n in names if n in self._option_string_actions]
        if known and names != ("-h", "--help"):
            self.reused.extend(n for n in names if n in self._option_string_actions)
            return known[0]
        return super().add_argument(*names, **kwargs)

    def error(self, message: str) -> NoReturn:
        raise ArgumentsError([message.removeprefix("argument ")])


class _HelpFormatter(argparse.HelpFormatter):
    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=40, width=120)


def metavar(flag: Flag) -> Any:
    if flag.metavar is not None:
        return flag.metavar
    if flag.choices is not None:
        return "{" + ",".join(map(str, flag.choices)) + "}"
    return {int: "N", float: "X", str: "TEXT", dict: "JSON"}.get(flag.kind, "VALUE")


def help_text(flag: Flag) -> str:
    """The help of `--help`: what the flag does, its range and its default."""
    notes = []
    if flag.kind is not bool:
        if bounds := range_text(flag):
            notes.append(bounds)
        if flag.default not in (None, [], {}):
            notes.append(f"default {_short(flag.default)}")
    elif flag.default is True and flag.options:
        notes.append("default on")
    return (flag.help + (f" ({'; '.join(notes)})" if notes else "")).replace("%", "%%")


def _short(value: Any) -> str:
    return " ".join(map(str, value)) if isinstance(value, list) else str(value)


_FLAG_ALIKE = 0.7  # below it, names of flags have little more in common than their words' endings

# What other trainers call it.
_ELSEWHERE = {
    "--batch-size": ["--rollout-batch-size", "--global-batch-size"],
    "--beta": ["--kl-loss-coef"],
    "--dataset": ["--prompt-data"],
    "--epochs": ["--num-epoch"],
    "--learning-rate": ["--lr"],
    "--max-completion-length": ["--rollout-max-response-len"],
    "--max-new-tokens": ["--rollout-max-response-len"],
    "--max-prompt-length": ["--rollout-max-prompt-len"],
    "--max-steps": ["--num-rollout"],
    "--max-tokens": ["--rollout-max-response-len"],
    "--model": ["--hf-checkpoint"],
    "--model-name-or-path": ["--hf-checkpoint"],
    "--model-path": ["--hf-checkpoint"],
    "--num-generations": ["--n-samples-per-prompt"],
    "--num-train-epochs": ["--num-epoch"],
    "--output-dir": ["--save"],
    "--resume": ["--load"],
    "--resume-from-checkpoint": ["--load"],
    "--reward-function": ["--custom-rm-path"],
    "--steps": ["--num-rollout"],
    "--temperature": ["--rollout-temperature"],
    "--top-k": ["--rollout-top-k"],
    "--top-p": ["--rollout-top-p"],
    "--warmup-steps": ["--lr-warmup-iters"],
}


def near(name: str, known: Iterable[str], cutoff: float = 0.6) -> list[str]:
    """Known names that `name` may mean: what it is called elsewhere, else of what it may be a misspelling, best first."""
    return _ELSEWHERE.get(name) or difflib.get_close_matches(name, list(known), n=3, cutoff=cutoff)


def did_you_mean(name: str, known: Iterable[str], cutoff: float = 0.6) -> str:
    """` (did you mean --x or --y?)`, or nothing."""
    found = near(name, known, cutoff)
    return f" (did you mean {' or '.join(found)}?)" if found else ""


def explain_unknown(parser: FlagParser, argv: Sequence[str]) -> list[str]:
    """One message for each unknown flag, and for each value that no flag takes; values of unknown flags go with them."""
    known = parser._option_string_actions
    problems: list[str] = []
    flag, room = "", 0
    for word in argv:
        if _is_flag(word):
            flag, equals, _ = word.partition("=")
            room = 0 if equals else _room(known[flag]) if flag in known else len(argv)
            if flag not in known:
                problems.append(f"unknown flag {flag}{did_you_mean(flag, known, _FLAG_ALIKE)}")
        elif room > 0:
            room -= 1
        elif flag:
            problems.append(f"stray value {word!r} after {flag}, which does not take it")
        else:
            problems.append(f"stray value {word!r}: values follow a flag")
    return problems


def _is_flag(word: str) -> bool:
    return word.startswith("-") and len(word) > 1 and not _NUMBER.match(word)


def _room(action: argparse.Action) -> int:
    """How many values an option may take."""
    if isinstance(action.nargs, int):
        return action.nargs
    return 1 if action.nargs in (None, "?") else 1 << 30
