"""Objects by import path, as flags name them: `package.module.attribute`."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable
from typing import Any

_registry: dict[str, Any] = {}


class ImportPathError(ValueError):
    """An import path that does not lead to a usable object."""


def register_function(name: str, obj: Any) -> None:
    """Let `load_function(name)` return `obj` in this process; for tests and notebooks."""
    _registry[name] = obj


def load_function(path: str | None) -> Any:
    """The object at `path` (`module.attr`, nested attributes allowed); None for None.

    Raises: ImportPathError that says which part of the path does not exist.
    """
    if path is None:
        return None
    if path in _registry:
        return _registry[path]
    parts = path.split(".")
    if len(parts) < 2 or not all(part.isidentifier() for part in parts):
        raise ImportPathError(f"{path!r} is not an import path: write package.module.name, with dots only")
    for cut in range(len(parts) - 1, 0, -1):
        module_name = ".".join(parts[:cut])
        try:
            target = importlib.import_module(module_name)
        except ModuleNotFoundError as error:
            if error.name is not None and (module_name == error.name or module_name.startswith(error.name + ".")):
                continue  # this much of the path is no module: try a shorter one
            raise ImportPathError(f"{path}: importing {module_name} failed: {error}") from error
        except Exception as error:
            raise ImportPathError(f"{path}: importing {module_name} failed: {type(error).__name__}: {error}") from error
        for depth, name in enumerate(parts[cut:], start=cut):
            if not hasattr(target, name):
                owner = ".".join(parts[:depth])
                raise ImportPathError(f"{path}: {owner} has no attribute {name!r}")
            target = getattr(target, name)
        return target
    raise ImportPathError(f"{path}: no module named {parts[0]!r}; is its folder on PYTHONPATH?")


def check_accepts(path: str, function: Callable, *, positional: int = 0, keywords: tuple[str, ...] = ()) -> None:
    """Raise ImportPathError unless `function` can be called with that many positionals and those keywords."""
    if not callable(function):
        raise ImportPathError(f"{path} is a {type(function).__name__}, not a function or class")
    try:
        signature = inspect.signature(function)
    except ValueError:
        return  # a builtin without a signature: nothing to check against
    try:
        signature.bind(*[None] * positional, **dict.fromkeys(keywords))
    except TypeError as error:
        wanted = ", ".join([f"arg{i + 1}" for i in range(positional)] + [f"{k}=..." for k in keywords])
        raise ImportPathError(
            f"{path}{signature} cannot be called as ({wanted}): {error}; docs/customize.md shows its form"
        ) from None
