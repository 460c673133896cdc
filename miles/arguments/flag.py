"""A flag is a dataclass field: its annotation, default and help are all that argparse, YAML, rules and docs need.

    @group("Weight update")
    class WeightUpdateArgs:
        update_weights_interval: int = flag(1, "Update the engines after this many rollouts.", ge=1)

`read_group` turns such a class into `Flag` objects; nothing else reads the dataclass machinery.
"""

from __future__ import annotations

import dataclasses
import types
import typing
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, dataclass_transform

KEY = "miles_flag"
REQUIRED_KINDS = (bool, int, float, str, dict)


@dataclass(frozen=True)
class Flag:
    """One flag, as the parser, the rules and the reference page see it.

    Attributes:
        name: attribute of `Args`; the option is `--` and the name with dashes, unless `options` says otherwise.
        kind: type of one value: bool, int, float, str, or dict (JSON text).
        many: takes several values (argparse `nargs="+"`, or exactly `nargs` of them).
        options, off_options: spellings that set the value, and, for a bool, that clear it.
        choices, ge, gt, le, lt: what a value must satisfy.
        system: the system of `systems.py` that it belongs to; refused away from its default until that works.
        later: values that belong to such a system, by value.
        owner: the switch of `owners.py` without which the flag has no effect.
        neutral: values, besides the default, that ask for nothing, and so are fine when the owner is off.
        hook: name in `rules/hooks.py` of the signature that the import path must have.
        path: "file" or "dir" when the value is a path that must exist at startup.
        lenient: given without its owner it is warned about, not refused: public launch commands give it out of habit.
        passed_on: an option of another program, left out of `--help`.
        dead: why the flag never has an effect; kept so that its users are told.
    """

    name: str
    kind: type
    default: Any
    help: str
    group: str
    optional: bool = False
    many: bool = False
    nargs: int | str | None = None
    append: bool = False
    options: tuple[str, ...] = ()
    off_options: tuple[str, ...] = ()
    choices: tuple[Any, ...] | None = None
    ge: float | None = None
    gt: float | None = None
    le: float | None = None
    lt: float | None = None
    metavar: str | tuple[str, ...] | None = None
    system: str | None = None
    later: Mapping[Any, str] = field(default_factory=dict)
    owner: str | None = None
    neutral: tuple[Any, ...] = ()
    hook: str | None = None
    path: str | None = None
    dead: str | None = None
    lenient: bool = False
    passed_on: bool = False

    @property
    def option(self) -> str:
        """The spelling that messages use."""
        return (self.options or self.off_options)[0]

    @property
    def type_name(self) -> str:
        kind = "json" if self.kind is dict else self.kind.__name__
        kind = f"list[{kind}]" if self.many else kind
        return f"{kind} | None" if self.optional else kind

    def is_neutral(self, value: Any) -> bool:
        """Whether `value` asks for nothing: the default, or as good as it."""
        if self.kind is bool and self.optional and value is False:
            return True
        return value == self.default or any(value == v for v in self.neutral)


class BadValue(ValueError):
    """A value that a flag does not take; the message names the flag and what it takes."""


def flag(
    default: Any,
    help: str,
    *,
    off: str | tuple[str, ...] | None = None,
    negatable: bool = False,
    option: str | None = None,
    aliases: tuple[str, ...] = (),
    **meta: Any,
) -> Any:
    """A dataclass field that is a flag. See `Flag` for `meta`.

    Args:
        off: for a bool that is true by default, the public spelling that clears it, e.g. `--disable-foo`.
        negatable: for a bool, accept both `--foo` and `--no-foo`. Implied by a default of None.
        option: the spelling, where it is not made from the name; `aliases` are further ones.
    """
    meta |= {"help": help, "off": off, "negatable": negatable, "option": option, "aliases": aliases}
    if isinstance(default, (list, dict)):
        return field(default_factory=lambda: type(default)(default), metadata={KEY: meta})
    return field(default=default, metadata={KEY: meta})


@dataclass_transform(kw_only_default=True, field_specifiers=(flag,))
def group(title: str, *, system: str | None = None, owner: str | None = None) -> Callable[[type], type]:
    """Class decorator: a keyword-only dataclass of flags; `system` and `owner` hold for fields that name none."""

    def decorate(cls: type) -> type:
        made: type = dataclass(kw_only=True)(cls)
        made.__flag_group__ = (title, system, owner)  # type: ignore[attr-defined]
        return made

    return decorate


def read_group(cls: type) -> list[Flag]:
    """The flags of a class made by `group`, in order."""
    title, system, owner = cls.__flag_group__  # type: ignore[attr-defined]
    hints = typing.get_type_hints(cls)
    return [_read_field(f, hints[f.name], title, system, owner) for f in dataclasses.fields(cls)]


def _read_field(f: dataclasses.Field, hint: Any, title: str, system: str | None, owner: str | None) -> Flag:
    meta = dict(f.metadata[KEY])
    default = f.default if f.default is not dataclasses.MISSING else f.default_factory()  # type: ignore[misc,operator]
    kind, many, optional = _unwrap(hint)
    on, off = _spellings(f.name, kind, default, meta)
    for key, inherited in (("system", system), ("owner", owner)):
        if meta.get(key) is None:
            meta[key] = inherited
    if meta.get("choices") is not None:
        meta["choices"] = tuple(meta["choices"])
    return Flag(
        name=f.name,
        kind=kind,
        default=default,
        group=title,
        optional=optional,
        many=many,
        options=on,
        off_options=off,
        **meta,
    )


def _unwrap(hint: Any) -> tuple[type, bool, bool]:
    """`list[int] | None` -> (int, many, optional)."""
    optional = many = False
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        optional = type(None) in typing.get_args(hint)
        (hint,) = [a for a in typing.get_args(hint) if a is not type(None)]
    if typing.get_origin(hint) is list:
        many = True
        (hint,) = typing.get_args(hint)
    if typing.get_origin(hint) is dict:
        hint = dict
    if hint not in REQUIRED_KINDS:
        raise TypeError(f"a flag cannot be a {hint}")
    return hint, many, optional


def _spellings(name: str, kind: type, default: Any, meta: dict[str, Any]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    off, negatable = meta.pop("off"), meta.pop("negatable")
    own = meta.pop("option") or "--" + name.replace("_", "-")
    on = (own, *meta.pop("aliases"))
    if kind is not bool:
        return on, ()
    if negatable or default is None:
        return on, tuple("--no-" + o.removeprefix("--") for o in on)
    if off is not None:
        return (), (off,) if isinstance(off, str) else tuple(off)
    if default:
        raise TypeError(f"flag {name} is true by default: say how it is cleared (off=..., or negatable=True)")
    return on, ()
