"""Configuration that hooks bring along."""

from __future__ import annotations

from miles.arguments.flag import flag, group


@group("Configuration files")
class HookArgs:
    custom_config_path: str | None = flag(
        None,
        "YAML (a path, or base64:...) whose keys override flags; a key that is no flag becomes an attribute for hooks, and "
        "is reported.",
        metavar="FILE",
    )
