"""The reference page of all flags: `python -m miles.arguments.reference > docs/flags.md`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from miles.arguments.args import FLAGS
from miles.arguments.flag import Flag
from miles.arguments.owners import OWNERS
from miles.arguments.passthrough import SERVER_FLAGS
from miles.arguments.systems import SYSTEMS, title, works
from miles.arguments.values import range_text
from miles.backends.sglang_utils.option_names import ROUTER_OPTIONS, SERVER_OPTIONS

INTRO = """# Flags

<!-- Made by `python -m miles.arguments.reference > docs/flags.md`; a test keeps it current. -->

Flags of `train.py` and `train_async.py`. A flag that is not given has the default shown, or a value that follows from others;
`--dry-run` prints what a command line comes to. Flags can also stand in a YAML file, under their names with underscores:
`--custom-config-path FILE` sets them over the command line.

Unknown flags, values of the wrong kind and combinations that cannot work end the start with one list of everything that is wrong.
So does a flag that would have no effect because the switch named under *needs* is off.

*Status*: an empty cell means that the flag works. `later` means that it is known and its values are checked, but that the system
it belongs to is not in this version: asking for it is refused. `no effect` marks flags kept for the commands that still pass them.
"""


def flag_page() -> str:
    """The whole page, as Markdown."""
    parts = [INTRO, *_systems()]
    groups: dict[str, list[Flag]] = {}
    for flag in FLAGS.values():
        groups.setdefault(flag.group, []).append(flag)
    for name, flags in groups.items():
        parts += [f"## {name}\n", *_table(flags)]
    parts += _passthrough()
    return "\n".join(parts) + "\n"


def _systems() -> Iterator[str]:
    waiting = [f"{name}: {text}" for name, (text, built) in SYSTEMS.items() if not built]
    if waiting:
        yield "Systems that are not in this version:\n"
        yield from (f"- {line}" for line in waiting)
        yield ""


def _table(flags: Iterable[Flag]) -> Iterator[str]:
    yield "| flag | type | default | status | meaning |"
    yield "|---|---|---|---|---|"
    for flag in flags:
        cells = (_options(flag), _type(flag), _default(flag), status(flag), _meaning(flag))
        yield "| " + " | ".join(cell.replace("|", "\\|").replace("\n", " ") for cell in cells) + " |"
    yield ""


def _options(flag: Flag) -> str:
    spelled = [*flag.options, *flag.off_options]
    return ", ".join(f"`{option}`" for option in spelled)


def _type(flag: Flag) -> str:
    if flag.kind is bool:
        return "switch"
    name = {dict: "JSON", str: "text", int: "int", float: "float"}[flag.kind]
    if flag.choices is not None:
        name = ", ".join(map(str, flag.choices))
    return f"list of {name}" if flag.many else name


def _default(flag: Flag) -> str:
    if flag.kind is bool and flag.default is not None:
        return "on" if flag.default and flag.options else "off"
    if flag.default is None or flag.default in ([], {}):
        return ""
    return " ".join(map(str, flag.default)) if isinstance(flag.default, list) else f"{flag.default}"


def status(flag: Flag) -> str:
    """`later: <system>`, `no effect`, or nothing for a flag that works."""
    if flag.dead is not None:
        return "no effect"
    if not works(flag.system):
        return f"later: {flag.system}"
    values = [f"{value} later: {system}" for value, system in flag.later.items() if not works(system)]
    return "; ".join(values)


def _meaning(flag: Flag) -> str:
    notes = [flag.help if flag.dead is None else f"{flag.dead[0].upper()}{flag.dead[1:]}."]
    if bounds := range_text(flag):
        notes.append(f"{bounds[0].upper()}{bounds[1:]}.")
    if flag.owner is not None and flag.dead is None and OWNERS[flag.owner].turn_on.split()[0] not in flag.options:
        notes.append(f"Needs {OWNERS[flag.owner].turn_on}.")
    return " ".join(notes)


def _passthrough() -> Iterator[str]:
    yield "## Options of SGLang\n"
    yield "Every option of SGLang's server is accepted as `--sglang-NAME`, and of its router as `--router-NAME`"
    yield f"(the router's wait for {title('sglang-router')})."
    yield "`--eval-sglang-NAME` sets the same for engines that only evaluate. Names known without SGLang installed:\n"
    for heading, prefix, table in (("Server", "sglang", SERVER_OPTIONS), ("Router", "router", ROUTER_OPTIONS)):
        yield f"### {heading}\n"
        for kind, names in table.items():
            own = [n for n in names.split() if f"{prefix}_{n}" in SERVER_FLAGS and f"{prefix}_{n}" not in FLAGS]
            yield f"**{kind}**: " + ", ".join(f"`{n.replace('_', '-')}`" for n in own) + "\n"


def flag_list() -> str:
    """One line a flag: name, type, default. A test compares it with the committed list, so that no flag changes unseen."""
    flags = [*FLAGS.values(), *(f for n, f in SERVER_FLAGS.items() if n not in FLAGS)]
    lines = [f"{' '.join((*f.options, *f.off_options))}\t{f.type_name}\t{f.default!r}" for f in flags]
    return "\n".join(sorted(lines)) + "\n"


if __name__ == "__main__":
    print(flag_page(), end="")
