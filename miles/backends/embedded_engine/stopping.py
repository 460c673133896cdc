"""Text as it grows: incremental detokenizing, and stop strings that span tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from miles.backends.embedded_engine.sampling_params import SamplingParams


class GrowingText:
    """Text of a growing token list, decoded a few tokens at a time.

    A token may be half a character, and its spacing may depend on the token before it. So each piece is decoded
    together with the tokens before it, and held back while it ends in an incomplete character.
    """

    def __init__(self, tokenizer: Any, params: SamplingParams):
        self._tokenizer = tokenizer
        self._options = {
            "skip_special_tokens": params.skip_special_tokens,
            "spaces_between_special_tokens": params.spaces_between_special_tokens,
        }
        self._ids: list[int] = []
        self._context, self._read = 0, 0
        self.text = ""
        self.stop_strings = params.stop
        self._searched = 0

    def feed(self, token: int) -> None:
        self._ids.append(token)
        before = self._decode(self._ids[self._context : self._read])
        now = self._decode(self._ids[self._context :])
        if len(now) > len(before) and not now.endswith("\ufffd"):
            self.text += now[len(before) :]
            self._context, self._read = self._read, len(self._ids)

    def _decode(self, ids: Sequence[int]) -> str:
        return self._tokenizer.decode(ids, **self._options)

    def matched(self) -> str | None:
        """The stop string that occurs first in the text, if any."""
        hits = [(at, s) for s in self.stop_strings if (at := self.text.find(s, self._searched)) >= 0]
        if hits:
            return min(hits)[1]
        longest = max(map(len, self.stop_strings), default=0)
        self._searched = max(0, len(self.text) - longest + 1)
        return None


def final_text(tokenizer: Any, output_ids: Sequence[int], params: SamplingParams, finish: dict[str, Any] | None) -> str:
    """The answer's text: without the matched stop token or string, unless `no_stop_trim`."""
    matched = (finish or {}).get("matched")
    ids = list(output_ids)
    if isinstance(matched, int) and not params.no_stop_trim and ids:
        ids.pop()
    text = tokenizer.decode(
        ids,
        skip_special_tokens=params.skip_special_tokens,
        spaces_between_special_tokens=params.spaces_between_special_tokens,
    )
    if isinstance(matched, str) and not params.no_stop_trim:
        text = text[: text.find(matched)] if matched in text else text
    return text
