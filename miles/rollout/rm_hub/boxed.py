r"""The answer inside `\boxed{...}`."""

from __future__ import annotations

import re

_BRACES = re.compile(r"\\boxed\s*\{|[{}]")


def last_boxed(text: str) -> str | None:
    r"""Content of the last complete `\boxed{}`, braces balanced; None without one. Linear in the text's length."""
    begun: list[int | None] = []  # open braces: where the content of a box begins, None for any other
    found = None
    for brace in _BRACES.finditer(text):
        if brace[0] != "}":
            begun.append(brace.end() if len(brace[0]) > 1 else None)
        elif begun:
            start = begun.pop()
            if start is not None and (found is None or start > found[0]):
                found = start, brace.start()
    return None if found is None else text[found[0] : found[1]].strip()
