"""`tito_session_mismatch`: how the tokens of a session differ from a fresh rendering of its messages.

Nothing here ever replaces a token. Differences in what the assistant said are expected, because sampled ids are kept; the
other classes mean that a template or a seam is broken:

    special_token_count   the two have other numbers of boundary tokens
    special_token_type    a boundary token is another one
    non_assistant_text    text that the assistant did not write is another one
    assistant_text        what the assistant wrote is spelled differently

A comparison ends with a `Checkpoint`; a longer conversation is compared from there on, so that a session's whole diagnosis
costs what comparing it once costs.
"""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import xxhash

from miles.rollout.tito.boundary import TitoTokenizer
from miles.rollout.tito.matchers import Message

HARD = ("special_token_count", "special_token_type", "non_assistant_text")
_HEAD = 20  # tokens behind a boundary that tell whose message it is


@dataclass(frozen=True)
class Checkpoint:
    """The first `text_end` characters of the rendering and the first `row_end` tokens agree, but for `found`."""

    text_end: int
    text_hash: int
    row_end: int
    segments: int
    found: tuple[dict[str, Any], ...]


@dataclass(frozen=True)
class _Segment:
    start: int
    ids: list[int]
    boundary: bool


class MismatchComparator:
    """Compares rows with renderings under one tokenizer and family."""

    def __init__(self, tito: TitoTokenizer) -> None:
        self.tito, self.encoder = tito, tito.encoder
        family, added = tito.family, tito.encoder.special_ids
        special = {str(t.content): i for i, t in tito.tokenizer.added_tokens_decoder.items() if t.special}
        if family.boundaries is not None:
            self._boundaries = {added[token] for token in family.boundaries if token in added}
        else:
            self._boundaries = {i for token, i in special.items() if token not in family.not_boundaries}
        self._trailing = {ids[0] for text in family.trailing if len(ids := self.encoder.encode(text)) == 1}
        self._start = family.assistant_start or tito.opener().partition("<think>")[0].strip()

    def compare(
        self,
        row: Sequence[int],
        messages: Sequence[Message],
        tools: list[dict] | None = None,
        kwargs: Mapping[str, Any] | None = None,
        *,
        sampled: Container[int] = (),
        resume: Checkpoint | None = None,
    ) -> tuple[list[dict[str, Any]], Checkpoint]:
        """Differences in order, empty when the row is what the template would have written, and where to go on.

        Args:
            row: the session's token ids.
            sampled: positions of the messages that the model wrote.
            resume: of an earlier comparison of a beginning of the same row; ignored when the text before it has changed.
        Raises: MessageError when the template refuses the messages.
        """
        text = self.tito.template.render(messages, tools, generation_prompt=False, kwargs=kwargs, sampled=sampled)
        text = text[: len(text) - len(self.tito.close_of(text))]
        if resume is None or _digest(text[: resume.text_end]) != resume.text_hash:
            resume = Checkpoint(0, _digest(""), 0, 0, ())
        expected = self._split(self._stripped(self.encoder.encode(text[resume.text_end :])))
        actual = self._split(self._without_end(self._stripped(list(row[resume.row_end :]))))
        if [s.boundary for s in expected] != [s.boundary for s in actual]:
            return [*resume.found, self._count_entry(expected, actual)], resume
        found = self._differences(expected, actual, resume.segments)
        return [*resume.found, *found], self._checkpoint(text, resume, expected, actual, found)

    def _differences(self, expected: list[_Segment], actual: list[_Segment], offset: int) -> list[dict[str, Any]]:
        found = []
        for i, (wanted, got) in enumerate(zip(expected, actual, strict=True)):
            if wanted.ids == got.ids:
                continue
            texts = self.encoder.decode(wanted.ids), self.encoder.decode(got.ids)
            if wanted.boundary:
                found.append(_entry("special_token_type", offset + i, *texts))
            elif texts[0] != texts[1]:
                spoken = self._is_assistant(expected, i) and self._is_assistant(actual, i)
                found.append(_entry("assistant_text" if spoken else "non_assistant_text", offset + i, *texts))
        return found

    def _checkpoint(
        self, text: str, old: Checkpoint, expected: list[_Segment], actual: list[_Segment], found: list[dict[str, Any]]
    ) -> Checkpoint:
        """Just before the last boundary token: what follows it may still grow."""
        last = next((i for i in reversed(range(len(expected))) if expected[i].boundary), None)
        if last is None:
            return old
        spelled = self.encoder.decode(expected[last].ids)
        text_end = text.rfind(spelled)
        if text_end < old.text_end:
            return old
        settled = [entry for entry in found if entry["segment_index"] < old.segments + last]
        return Checkpoint(
            text_end,
            _digest(text[:text_end]),
            old.row_end + actual[last].start,
            old.segments + last,
            (*old.found, *settled),
        )

    def _stripped(self, ids: list[int]) -> list[int]:
        end = len(ids)
        while end and ids[end - 1] in self._trailing:
            end -= 1
        return ids[:end]

    def _without_end(self, ids: list[int]) -> list[int]:
        """How the last turn ended is not compared: it may have been cut off, or have ended otherwise than in a history."""
        return ids[:-1] if ids and ids[-1] in self.tito.end_ids else ids

    def _split(self, ids: list[int]) -> list[_Segment]:
        cuts = sorted({0, len(ids)} | {c for i, t in enumerate(ids) if t in self._boundaries for c in (i, i + 1)})
        return [_Segment(a, ids[a:b], ids[a] in self._boundaries) for a, b in pairwise(cuts)]

    def _is_assistant(self, segments: list[_Segment], at: int) -> bool:
        if at == 0 or not segments[at - 1].boundary or not self._start:
            return False
        head = self.encoder.decode(segments[at - 1].ids) + self.encoder.decode(segments[at].ids[:_HEAD])
        return head.startswith(self._start)

    def _count_entry(self, expected: list[_Segment], actual: list[_Segment]) -> dict[str, Any]:
        wanted, got = (
            "".join(self.encoder.decode(s.ids) if s.boundary else "·" for s in segments)
            for segments in (expected, actual)
        )
        return _entry("special_token_count", -1, wanted, got)


def _digest(text: str) -> int:
    return xxhash.xxh3_64_intdigest(text.encode("utf-8", "surrogatepass"))


def _entry(kind: str, index: int, expected: str, actual: str) -> dict[str, Any]:
    at = next(
        (i for i, (a, b) in enumerate(zip(expected, actual, strict=False)) if a != b), min(len(expected), len(actual))
    )
    return {
        "type": kind,
        "segment_index": index,
        "expected_text": expected,
        "actual_text": actual,
        "detail": f"first difference at character {at}",
    }
