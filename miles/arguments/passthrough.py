"""`--sglang-*`, `--eval-sglang-*` and `--router-*`: options of other programs under a prefix."""

from __future__ import annotations

from miles.arguments.flag import Flag

SERVER_FLAGS: dict[str, Flag] = {}
