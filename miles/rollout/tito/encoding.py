"""Rendered text to ids, where text that only spells a special token stays text.

Content is shielded before it goes through a template: each spelling of a special token becomes one private-use character, which
templates pass through. When the rendered text is encoded, what the template wrote becomes special tokens, and what was
shielded is encoded as plain text in its place.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from typing import Any

_FIRST = 0xF0000  # the private use plane; its first character escapes content that has such characters itself


class Encoder:
    """One tokenizer's text and ids.

    Args:
        structural: further spellings that separate messages although the tokenizer does not flag them as special.
    """

    def __init__(self, tokenizer: Any, structural: Iterable[str] = ()) -> None:
        self.tokenizer = tokenizer
        added = {str(token.content): i for i, token in tokenizer.added_tokens_decoder.items() if str(token.content)}
        control = {str(token.content) for token in tokenizer.added_tokens_decoder.values() if token.special}
        control |= set(structural) & set(added)
        self.special_ids: dict[str, int] = added
        self.shielded = 0  # spellings that were kept as text, over the encoder's life
        self._added = added
        self._spellings = sorted(added, key=lambda s: (-len(s), s))
        self._mark = {spelling: chr(_FIRST + 1 + i) for i, spelling in enumerate(self._spellings)}
        last = chr(_FIRST + len(self._spellings))
        self._private = re.compile(f"[{chr(_FIRST)}-{last}]")
        self._marked = re.compile(f"{chr(_FIRST)}(.)|([{chr(_FIRST + 1)}-{last}])", re.DOTALL)
        self._any = _alternatives(self._spellings)
        self._control = _alternatives([s for s in self._spellings if s in control])
        self._plain: Any = None
        # Its wrapper does the same with more ceremony, unless it was told to cut or to pad.
        self._fast = tokenizer.backend_tokenizer if tokenizer.is_fast else None

    def shield(self, text: str, *, only_control: bool = False) -> str:
        """Text that no encoding of ours will read special tokens out of.

        Args:
            only_control: shield tokens that structure conversations, and leave those that are part of a model's own
                speech (`<think>`, `<tool_call>`), for text whose author may mean them.
        """
        text = self._private.sub(lambda m: chr(_FIRST) + m[0], text)
        pattern = self._control if only_control else self._any
        if pattern is None:
            return text
        text, count = pattern.subn(lambda m: self._mark[m[0]], text)
        self.shielded += count
        return text

    def unshield(self, text: str) -> str:
        """The text as its author wrote it."""
        return self._marked.sub(lambda m: m[1] or self._spellings[ord(m[2]) - _FIRST - 1], text)

    def encode(self, text: str) -> list[int]:
        """Ids of rendered text, nothing added. Equal to the tokenizer's own wherever nothing was shielded."""
        if not self._private.search(text):
            return self._native(text)
        ids: list[int] = []
        at = 0
        for match in self._any.finditer(text) if self._any else ():
            ids += self._chunk(text[at : match.start()])
            ids.append(self._added[match[0]])
            at = match.end()
        return ids + self._chunk(text[at:])

    def decode(self, ids: list[int]) -> str:
        if self._fast is not None:
            return self._fast.decode(ids, skip_special_tokens=False)
        return self.tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)

    def _native(self, text: str) -> list[int]:
        if not text:
            return []
        if self._fast is not None:
            return self._fast.encode_batch_fast([text], add_special_tokens=False)[0].ids
        return self.tokenizer(text, add_special_tokens=False)["input_ids"]

    def _chunk(self, text: str) -> list[int]:
        """Ids of text between special tokens."""
        if not self._private.search(text):
            return self._native(text)
        text = self.unshield(text)
        if not self.tokenizer.is_fast:
            return self.tokenizer(text, add_special_tokens=False, split_special_tokens=True)["input_ids"]
        if self._plain is None:
            self._plain = _without_added_tokens(self.tokenizer)
        return self._plain.encode(text, add_special_tokens=False).ids


def _alternatives(spellings: list[str]) -> re.Pattern[str] | None:
    return re.compile("|".join(map(re.escape, spellings))) if spellings else None


def _without_added_tokens(tokenizer: Any) -> Any:
    from tokenizers import Tokenizer

    spec = json.loads(tokenizer.backend_tokenizer.to_str())
    spec |= {"added_tokens": [], "post_processor": None, "truncation": None, "padding": None}
    return Tokenizer.from_str(json.dumps(spec))
