r"""The answer inside `\boxed{...}`."""

from __future__ import annotations

import re

_OPENING = re.compile(r"\\boxed\s*\{")


def last_boxed(text: str) -> str | None:
    r"""Content of the last complete `\boxed{}`, braces balanced; None without one."""
    for match in reversed(list(_OPENING.finditer(text))):
        depth = 1
        for end in range(match.end(), len(text)):
            char = text[end]
            depth += (char == "{") - (char == "}")
            if depth == 0:
                return text[match.end() : end].strip()
    return None
