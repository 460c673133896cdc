"""Flags that cannot do what they say: their system is not built, their owner is off, or nothing ever read them."""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Iterator

from miles.arguments.args import ALL_FLAGS, FLAGS, Args
from miles.arguments.flag import Flag
from miles.arguments.owners import OWNERS
from miles.arguments.parser import did_you_mean
from miles.arguments.rules.rule import RuleSet
from miles.arguments.systems import missing, works
from miles.utils.imports import ImportPathError, load_function


def _asked_for(args: Args) -> Iterator[Flag]:
    """Flags that were given a value that asks for something."""
    for name in sorted(args.given):
        flag = ALL_FLAGS.get(name)
        if flag is not None and not flag.is_neutral(getattr(args, name)):
            yield flag


def unbuilt(args: Args) -> Iterator[str]:
    """One message for each system that is asked for and not there."""
    by_system: dict[str, list[str]] = defaultdict(list)
    for flag in _asked_for(args):
        value = getattr(args, flag.name)
        if not works(flag.system):
            by_system[flag.system].append(spelled(flag, value))  # type: ignore[index]
        for item in value if isinstance(value, list) else [value]:
            system = flag.later.get(item) if isinstance(item, (str, int, float, bool)) else None
            if not works(system):
                by_system[system].append(f"{flag.option} {item}")  # type: ignore[index]
    for system, flags in by_system.items():
        yield missing(system, *flags)


def without_effect(args: Args) -> Iterator[str]:
    """One message for each owner that is off although its flags are given."""
    yield from _idle(args, lenient=False)


def without_effect_by_habit(args: Args) -> Iterator[str]:
    """The same for flags that public launch commands give out of habit: worth a warning."""
    yield from _idle(args, lenient=True)


def _idle(args: Args, lenient: bool) -> Iterator[str]:
    by_owner: dict[str, list[str]] = defaultdict(list)
    for flag in _asked_for(args):
        if flag.owner is None or flag.lenient != lenient or not works(flag.system):
            continue
        if not OWNERS[flag.owner].is_on(args):
            by_owner[flag.owner].append(flag.option)
    for owner, options in by_owner.items():
        verb, drop = ("has", "it") if len(options) == 1 else ("have", "them")
        yield f"{', '.join(options)} {verb} no effect without {OWNERS[owner].turn_on}: set that, or drop {drop}"


def dead(args: Args) -> Iterator[str]:
    for flag in _asked_for(args):
        if flag.dead is not None:
            yield f"{flag.option} has no effect ({flag.dead}): drop it"


def spelled(flag: Flag, value: object) -> str:
    """How the flag was given, for messages: option and value, for a bool the option that gives that value."""
    if flag.kind is bool:
        options = flag.options if value else flag.off_options
        return options[0] if options else flag.option
    text = " ".join(map(str, value)) if isinstance(value, list) else str(value)
    return f"{flag.option} {text}" if len(text) <= 40 else flag.option


def attributes_from_yaml(args: Args) -> Iterator[str]:
    """Keys of `--custom-config-path` that nothing declared: right for hooks, and what a misspelt flag looks like."""
    read = _settings_of_hooks(args)
    names = [f"{name}{did_you_mean(name, FLAGS, _ALIKE)}" for name in args.yaml_attributes if name not in read]
    if names:
        verb, what = (
            ("is no flag and becomes", "an attribute") if len(names) == 1 else ("are no flags and become", "attributes")
        )
        yield f"--custom-config-path: {', '.join(names)} {verb} {what} of args that only your own functions read"


def _settings_of_hooks(args: Args) -> set[str]:
    """Names that functions given by import path say they read: their attribute `settings`."""
    read: set[str] = set()
    for name in args.given:
        flag = FLAGS.get(name)
        if flag is not None and flag.hook is not None and getattr(args, name) is not None:
            with contextlib.suppress(ImportPathError):  # the rule on hooks reports it
                read.update(getattr(load_function(getattr(args, name)), "settings", ()))
    return read


_ALIKE = 0.7  # how much like a flag's name a key must be for the flag to be offered

RULES = (
    RuleSet("system-is-built", unbuilt),
    RuleSet("flag-has-effect", without_effect),
    RuleSet("flag-is-alive", dead),
)
WARNINGS = (
    RuleSet("habit-has-effect", without_effect_by_habit),
    RuleSet("attribute-from-yaml", attributes_from_yaml),
)
