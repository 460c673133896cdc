"""From a command line to `Args`: parse, apply YAML, derive what was not given, check the rules."""

from __future__ import annotations

import logging
import sys
from collections.abc import Sequence
from typing import Any

from miles.arguments.args import ALL_FLAGS, Args
from miles.arguments.config_files import apply_custom_config, apply_fsdp_config
from miles.arguments.extra_flags import add_function_flags
from miles.arguments.flag import BadValue
from miles.arguments.parser import ArgumentsError, FlagParser, did_you_mean, explain_unknown
from miles.arguments.passthrough import SERVER_FLAGS, installed_flags
from miles.arguments.resolve import resolve
from miles.arguments.rules import check
from miles.arguments.values import coerce

logger = logging.getLogger(__name__)
EXIT_BAD_ARGUMENTS = 2


def parse_args(argv: Sequence[str] | None = None, *, driver: str | None = None) -> Args:
    """The arguments of a run, complete and consistent.

    Args:
        argv: command line without the program; `sys.argv[1:]` when None.
        driver: the driver that asks, `train.py` or `train_async.py`; some modes need one of them.
    Bad arguments end the process with code 2, after everything that is wrong with them was printed.
    """
    try:
        args = read_command_line(sys.argv[1:] if argv is None else argv, driver=driver)
        resolve(args)
        check(args)
    except ArgumentsError as error:
        print(f"miles: {error}\n\nEvery flag is explained by --help and in docs/flags.md.", file=sys.stderr)
        raise SystemExit(EXIT_BAD_ARGUMENTS) from None
    for name, why in args.derived.items():
        logger.info("%s = %r (%s)", name, getattr(args, name, None), why)
    return args


def make_args(*, check: bool = True, driver: str | None = None, **fields: Any) -> Args:
    """Arguments from Python values, for tests and notebooks: defaults, `fields`, then everything as `parse_args` does.

    Args:
        check: apply the startup rules too.
    Raises: ArgumentsError.
    """
    values, problems = {}, []
    for name, value in fields.items():
        if name not in ALL_FLAGS:
            problems.append(f"no flag {name}{did_you_mean(name, ALL_FLAGS)}")
            continue
        try:
            values[name] = coerce(ALL_FLAGS[name], value, source=name)
        except BadValue as error:
            problems.append(str(error))
    if problems:
        raise ArgumentsError(problems)
    args = Args(values, driver=driver)
    apply_files(args)
    resolve(args)
    if check:
        _check(args)
    return args


_check = check  # `make_args` has a parameter of that name


def read_command_line(argv: Sequence[str], *, driver: str | None = None) -> Args:
    """Parse and apply configuration files; nothing is derived or checked against other flags yet.

    Raises: ArgumentsError with every unknown flag and bad value.
    """
    table = ALL_FLAGS | (installed_flags(_sglang_python(argv)) if _names_unknown_server_option(argv) else {})
    parser = FlagParser(table.values())
    problems = add_function_flags(parser, argv)
    namespace, unknown = parser.parse_known_args(list(argv))
    if unknown:
        problems += explain_unknown(parser, argv)
    values: dict[str, Any] = {}
    extras: dict[str, Any] = {}
    for name, value in vars(namespace).items():
        try:
            target = values if name in ALL_FLAGS else extras
            target[name] = coerce(table[name], value) if name in table else value
        except BadValue as error:
            problems.append(str(error))
    if problems:
        raise ArgumentsError(problems)
    args = Args(values, extras, driver=driver)
    apply_files(args)
    return args


def _names_unknown_server_option(argv: Sequence[str]) -> bool:
    known = {option for flag in SERVER_FLAGS.values() for option in (*flag.options, *flag.off_options)}
    known |= {flag.option for flag in ALL_FLAGS.values()}
    return any(w.startswith("--sglang-") and w.split("=", 1)[0] not in known for w in argv)


def _sglang_python(argv: Sequence[str]) -> str | None:
    parser = FlagParser([ALL_FLAGS["sglang_python"]])
    return parser.parse_known_args(list(argv))[0].__dict__.get("sglang_python")


def apply_files(args: Args) -> None:
    """The FSDP YAML below the command line, the custom YAML above it.

    Raises: ArgumentsError.
    """
    problems = apply_fsdp_config(args) + apply_custom_config(args)
    if problems:
        raise ArgumentsError(problems)
