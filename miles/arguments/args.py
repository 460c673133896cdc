"""`Args`: every flag as an attribute, under the flag's name with underscores."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from miles.arguments.flag import Flag, read_group
from miles.arguments.groups import GROUPS
from miles.arguments.passthrough import SERVER_FLAGS

FLAGS: dict[str, Flag] = {f.name: f for cls in GROUPS for f in read_group(cls)}
ALL_FLAGS: dict[str, Flag] = FLAGS | {n: f for n, f in SERVER_FLAGS.items() if n not in FLAGS}


class Args:
    """All flags of a run as plain attributes: picklable, and open for hooks to add to.

    `given` names the flags that the command line, a YAML file or `make_args` set; `derived` says, for each value that
    was filled in, why. Attributes that are no flags come from YAML and from `add_arguments` of user functions.
    """

    def __init__(self, values: dict[str, Any], extras: dict[str, Any] | None = None, driver: str | None = None) -> None:
        for name, flag in ALL_FLAGS.items():
            setattr(self, name, values[name] if name in values else copy.deepcopy(flag.default))
        for name, value in (extras or {}).items():
            setattr(self, name, value)
        self._meta: dict[str, Any] = {
            "given": frozenset(values),
            "yaml_attributes": (),
            "warnings": (),
            "derived": {},
            "driver": driver,
            "as_given": dict(values),
        }

    if TYPE_CHECKING:  # flags are set by name

        def __getattr__(self, name: str) -> Any: ...

    @property
    def given(self) -> frozenset[str]:
        return self._meta["given"]

    @property
    def derived(self) -> dict[str, str]:
        return self._meta["derived"]

    @property
    def yaml_attributes(self) -> tuple[str, ...]:
        """Attributes that `--custom-config-path` added and that nothing declared."""
        return self._meta["yaml_attributes"]

    @property
    def warnings(self) -> tuple[str, ...]:
        """What the startup rules found worth saying; filled in by `check`."""
        return self._meta["warnings"]

    @property
    def driver(self) -> str | None:
        """`train.py` or `train_async.py`; None where no driver was named."""
        return self._meta["driver"]

    def given_value(self, name: str) -> Any:
        """What was given for a flag, though another flag may have decided it since; None where nothing was."""
        return self._meta["as_given"].get(name)

    def set_given(self, name: str, value: Any) -> None:
        """Set a flag as if the command line had."""
        setattr(self, name, value)
        self._meta["given"] = self.given | {name}
        self._meta["as_given"][name] = value

    def set_attribute(self, name: str, value: Any) -> None:
        """Set, from YAML, what is no flag."""
        if not hasattr(self, name):
            self._meta["yaml_attributes"] = (*self.yaml_attributes, name)
        setattr(self, name, value)

    def set_warnings(self, warnings: Iterable[str]) -> None:
        self._meta["warnings"] = tuple(warnings)

    def update(self, values: dict[str, Any], why: str) -> None:
        """Fill in derived values, remembering why."""
        for name, value in values.items():
            setattr(self, name, value)
            self.derived[name] = why

    def options(self, names: Iterable[str]) -> str:
        """`--a 1, --b 2` for messages."""
        return ", ".join(f"{ALL_FLAGS[n].option} {getattr(self, n)}" for n in names)

    def __contains__(self, name: str) -> bool:
        return hasattr(self, name)

    def to_dict(self) -> dict[str, Any]:
        """Every flag, and every extra attribute, by name. Secrets are left out."""
        known = [n for n in ALL_FLAGS if n not in SECRETS]
        hidden = {"_meta", *SECRETS}
        extras = [n for n in vars(self) if n not in ALL_FLAGS and n not in hidden]
        return {name: copy.deepcopy(getattr(self, name)) for name in (*known, *extras)}

    def __repr__(self) -> str:
        shown = ", ".join(
            f"{n}={getattr(self, n)!r}" for n in sorted(self.given) if n in ALL_FLAGS and n not in SECRETS
        )
        return f"Args({shown})"


SECRETS = ("wandb_key",)
