"""`--sglang-*`, `--eval-sglang-*` and `--router-*`: options of SGLang's server and router under a prefix.

The names are known here whether SGLang is installed or not. An option that only the installed SGLang knows is accepted
too (`installed_flags`).
"""

from __future__ import annotations

from collections.abc import Iterator

from miles.arguments.flag import Flag
from miles.backends.sglang_utils.installation import SglangMissing, installed
from miles.backends.sglang_utils.option_names import ROUTER_OPTIONS, SERVER_ALIASES, SERVER_OPTIONS

_KINDS = {"switch": bool, "negatable": bool, "int": int, "float": float, "text": str}
_PLURALS = {"ints": int, "floats": float, "texts": str, "pairs": str}


def _flags(prefix: str, group: str, tables: dict[str, str], system: str, negatable: bool) -> Iterator[Flag]:
    for kind, names in tables.items():
        for name in names.split():
            yield _flag(prefix, name, kind, group, system, negatable)


def _flag(prefix: str, name: str, kind: str, group: str, system: str, negatable: bool) -> Flag:
    aliases = SERVER_ALIASES.get(name, ()) if prefix != "router" else ()
    bare = [f"{prefix}-{spelling}".replace("_", "-") for spelling in (name, *aliases)]
    both = kind == "negatable" or (negatable and kind == "switch")
    program = "router" if prefix == "router" else "server"
    return Flag(
        name=f"{prefix}_{name}".replace("-", "_"),
        kind=_KINDS.get(kind) or _PLURALS[kind],
        default=None,
        help=f"SGLang {program} option --{name.replace('_', '-')}.",
        group=group,
        optional=True,
        many=kind in _PLURALS,
        append=kind == "pairs",
        nargs="*" if kind in _PLURALS else None,
        options=tuple(f"--{b}" for b in bare),
        off_options=tuple(f"--no-{b}" for b in bare) if both else (),
        system=system,
        owner="sglang",
        passed_on=True,
    )


def _build() -> dict[str, Flag]:
    eval_options = {k: " ".join(n for n in v.split() if n != "tp_size") for k, v in SERVER_OPTIONS.items()}
    families = (
        _flags("sglang", "SGLang server (--sglang-*)", SERVER_OPTIONS, "sglang", False),
        _flags(
            "eval-sglang", "SGLang server of evaluation engines (--eval-sglang-*)", eval_options, "eval-fleet", True
        ),
        _flags("router", "SGLang router (--router-*)", ROUTER_OPTIONS, "sglang-router", False),
    )
    return {flag.name: flag for family in families for flag in family}


SERVER_FLAGS: dict[str, Flag] = _build()


def installed_flags(python: str | None) -> dict[str, Flag]:
    """Options that the SGLang of `python` has beyond the table; empty where it has none.

    Finding out may take seconds, so it is asked only when a command line names an option that the table lacks.
    """
    try:
        options = installed(python).options.values()
    except SglangMissing:
        return {}
    found = {}
    for option in options:
        kind = "texts" if option.values == "many" else "text" if option.values else "switch"
        flag = _flag("sglang", option.field, kind, "SGLang server (--sglang-*)", "sglang", False)
        if flag.name not in SERVER_FLAGS:
            found[flag.name] = flag
    return found
