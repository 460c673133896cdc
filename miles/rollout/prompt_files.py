"""Rows of prompt files (JSONL, JSON, parquet) as they are: paths, slices, and every unreadable row by its number.

A path may carry a slice, `data.jsonl@[100:200]`, and several paths may be given, separated by commas.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

_SLICE = re.compile(r"^(?P<path>.*)@\[(?P<start>-?\d+|):(?P<stop>-?\d+|)\]$")
_MEANT_AS_SLICE = re.compile(r"^(?P<path>.+\.(?:jsonl|json|parquet))(?P<slice>[@\[][^/]*)$")
_MAX_LISTED_ROWS = 10
_HEAD_ROWS = 1000  # of a parquet file whose head is asked for


class DatasetError(ValueError):
    """Prompt data that cannot be used; the message lists every bad row with its file."""


@dataclass(frozen=True)
class RawRow:
    file: str
    number: int  # 1-based: line of a JSONL file, position in a JSON array or parquet table
    fields: dict[str, Any]
    text: str | None  # the JSON text, from which a number label is taken literally


@dataclass(frozen=True)
class RawRows:
    """What was read of a file; `whole` is false when only its head was."""

    rows: list[RawRow]
    whole: bool


class Problems:
    """Bad rows of the data that `option` names."""

    def __init__(self, option: str) -> None:
        self.option = option
        self.lines: list[str] = []

    def add(self, file: str, number: int, what: str) -> None:
        self.lines.append(f"{file} row {number}: {what}")

    def raise_if_any(self) -> None:
        if not self.lines:
            return
        count = "1 bad row" if len(self.lines) == 1 else f"{len(self.lines)} bad rows"
        shown = self.lines[:_MAX_LISTED_ROWS]
        hidden = len(self.lines) - len(shown)
        more = f"\n  ... and {hidden} more" if hidden else ""
        raise DatasetError(f"{count} in {self.option}:\n  " + "\n  ".join(shown) + more)


# ---- paths -------------------------------------------------------------------------------------------------------


def split_paths(spec: str | Sequence[str]) -> list[str]:
    """`a.jsonl,b.jsonl@[0:9]` -> its paths. A path that exists as written is one path, commas included."""
    if not isinstance(spec, str):
        return [path for part in spec for path in split_paths(part)]
    match = _SLICE.match(spec)
    if Path(match["path"] if match else spec).exists():
        return [spec]
    return [part for part in (p.strip() for p in spec.split(",")) if part]


def parse_slice(spec: str) -> tuple[str, slice]:
    """`file@[a:b]` -> (file, slice(a, b)); both ends optional, negative ones count from the end.

    Raises: DatasetError for what was meant as a slice and is none.
    """
    match = _SLICE.match(spec)
    if match is not None:
        start, stop = (int(match[name]) if match[name] else None for name in ("start", "stop"))
        return match["path"], slice(start, stop)
    meant = _MEANT_AS_SLICE.match(spec)
    if meant is not None and not Path(spec).exists():
        raise DatasetError(
            f"{spec}: {meant['slice']} is no slice of rows. A slice is written @[start:stop], in whole numbers counted "
            f"from 0, either of which may be left out: {meant['path']}@[0:100]"
        )
    return spec, slice(None)


# ---- files -------------------------------------------------------------------------------------------------------


def read_rows(spec: str, problems: Problems, *, head: int | None = None) -> RawRows:
    """The rows of one path; those that are no rows go into `problems`.

    Args:
        head: read no more than about this many bytes (of a parquet file larger than that: its first rows).
    Raises: DatasetError for a file that cannot be read at all.
    """
    try:
        path, part = parse_slice(spec)
    except DatasetError as error:
        raise DatasetError(f"{problems.option} {error}") from None
    file, name = Path(path), f"{problems.option} {path}"
    if not file.is_file():
        raise DatasetError(f"{name}: {'a folder; name the files in it' if file.is_dir() else 'no such file'}")
    readers = {".jsonl": _read_jsonl, ".json": _read_json, ".parquet": _read_parquet}
    if file.suffix not in readers:
        raise DatasetError(f"{name}: unknown format {file.suffix!r}; use .jsonl, .json or .parquet")
    try:
        return readers[file.suffix](file, part, problems, head)
    except UnicodeDecodeError as error:
        raise DatasetError(f"{name}: not UTF-8 text: {error.reason} ({error.object[error.start]:#04x})") from None
    except OSError as error:
        raise DatasetError(f"{name}: cannot be read: {error.strerror or error}") from None


def _cut(items: list[Any], part: slice, whole: bool) -> list[Any]:
    """The slice of a file of which `items` is all, or the head: a slice that counts from the end of a head is unknown."""
    from_end = (part.start or 0) < 0 or (part.stop or 0) < 0
    return items[part] if whole or not from_end else []


def _read_jsonl(file: Path, part: slice, problems: Problems, head: int | None) -> RawRows:
    lines, size, whole = [], 0, True
    with open(file, encoding="utf-8") as f:
        for number, line in enumerate(f, start=1):
            if head is not None and size >= head:
                whole = False
                break
            size += len(line)
            if line.strip():
                lines.append((number, line.rstrip()))
    return RawRows(_parsed(file, _cut(lines, part, whole), problems), whole)


def _read_json(file: Path, part: slice, problems: Problems, head: int | None) -> RawRows:
    with open(file, encoding="utf-8") as f:
        text = f.read() if head is None else f.read(head)
        whole = head is None or not f.read(1)
    elements: list[str] = []
    try:
        for element in _array_elements(text):
            elements.append(element)
    except ValueError as error:
        if whole or not text.lstrip().startswith("["):  # a head ends in the middle of a row
            raise DatasetError(f"{problems.option} {file}: not a JSON array of rows: {error}") from None
    return RawRows(_parsed(file, _cut(list(enumerate(elements, start=1)), part, whole), problems), whole)


def _parsed(file: Path, numbered: list[tuple[int, str]], problems: Problems) -> list[RawRow]:
    rows = []
    for number, text in numbered:
        try:
            fields = json.loads(text)
        except json.JSONDecodeError as error:
            problems.add(str(file), number, f"not JSON: {error.msg} at column {error.colno}")
            continue
        if isinstance(fields, dict):
            rows.append(RawRow(str(file), number, fields, text))
        else:
            problems.add(str(file), number, f"a row must be a JSON object, not a {type(fields).__name__}")
    return rows


def _read_parquet(file: Path, part: slice, problems: Problems, head: int | None) -> RawRows:
    import pyarrow.parquet

    try:
        if head is None or file.stat().st_size <= head:
            fields, whole = pyarrow.parquet.read_table(file).to_pylist(), True
        else:
            with pyarrow.parquet.ParquetFile(file) as table:
                batches = islice(table.iter_batches(batch_size=_HEAD_ROWS), 1)
                fields = [row for batch in batches for row in batch.to_pylist()]
                whole = table.metadata.num_rows <= _HEAD_ROWS
    except PermissionError:
        raise
    except Exception as error:
        raise DatasetError(f"{problems.option} {file}: not a readable parquet file: {error}") from error
    numbered = _cut(list(enumerate(fields, start=1)), part, whole)
    return RawRows([RawRow(str(file), number, row, None) for number, row in numbered], whole)


# ---- JSON text, kept literally -----------------------------------------------------------------------------------

_DECODER = json.JSONDecoder()
_BLANK = re.compile(r"[ \t\r\n]*")


def _skip(text: str, at: int, symbol: str = "") -> int:
    at = _BLANK.match(text, at).end()  # type: ignore[union-attr]
    if symbol and text[at : at + 1] != symbol:
        raise ValueError(f"expected {symbol!r} at character {at}")
    return _BLANK.match(text, at + len(symbol)).end()  # type: ignore[union-attr]


def _array_elements(text: str) -> Iterator[str]:
    at = _skip(text, 0, "[")
    while text[at : at + 1] != "]":
        _, end = _DECODER.raw_decode(text, at)
        yield text[at:end]
        at = _skip(text, end)
        if text[at : at + 1] != "]":
            at = _skip(text, at, ",")
    if _skip(text, at, "]") != len(text):
        raise ValueError(f"more text after the array, at character {at + 1}")


def field_text(text: str, key: str) -> str:
    """The literal JSON text of a top-level field: `{"label": 1e3}` -> `1e3`."""
    found, at = "null", _skip(text, 0, "{")
    while text[at : at + 1] != "}":
        name, end = _DECODER.raw_decode(text, at)
        start = _skip(text, end, ":")
        _, end = _DECODER.raw_decode(text, start)
        if name == key:
            found = text[start:end]
        at = _skip(text, end)
        if text[at : at + 1] == ",":
            at = _skip(text, at, ",")
    return found
