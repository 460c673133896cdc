"""Rows of a prompt file (JSONL, JSON, parquet), checked all at once, turned into prompts.

A path may carry a slice, `data.jsonl@[100:200]`, and several paths may be given, separated by commas.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from miles.rollout.prompts import Prompt, chat_template_kwargs, encode_prompt, render_chat

_SLICE = re.compile(r"^(?P<path>.*)@\[(?P<start>-?\d*):(?P<stop>-?\d*)\]$")
_MAX_LISTED_ROWS = 100


class DatasetError(ValueError):
    """Prompt data that cannot be used; the message lists every bad row with its file."""


@dataclass(frozen=True)
class DatasetKeys:
    """Column names: prompt, label, metadata, tools."""

    input: str = "input"
    label: str | None = None
    metadata: str = "metadata"
    tools: str = "tools"


@dataclass(frozen=True)
class PromptRow:
    """One prompt, ready to be sampled from.

    `length` is in tokens, None when it was not needed; `where` names file and row for messages.
    """

    prompt: Prompt
    label: str | None
    metadata: dict[str, Any] = field(default_factory=dict)
    length: int | None = None
    where: str = ""


@dataclass(frozen=True)
class _RawRow:
    file: str
    number: int  # 1-based: line of a JSONL file, position in a JSON array or parquet table
    fields: dict[str, Any]
    text: str | None  # the JSON text, from which a number label is taken literally


class _Problems:
    def __init__(self) -> None:
        self.lines: list[str] = []

    def add(self, file: str, number: int, what: str) -> None:
        self.lines.append(f"{file} row {number}: {what}")

    def raise_if_any(self) -> None:
        if not self.lines:
            return
        shown = self.lines[:_MAX_LISTED_ROWS]
        hidden = len(self.lines) - len(shown)
        more = f"\n  ... and {hidden} more" if hidden else ""
        raise DatasetError(f"{len(self.lines)} bad rows in the prompt data:\n  " + "\n  ".join(shown) + more)


# ---- files -------------------------------------------------------------------------------------------------------


def split_paths(spec: str | Sequence[str]) -> list[str]:
    """`a.jsonl,b.jsonl@[0:9]` -> its paths. A path that exists as written is one path, commas included."""
    if not isinstance(spec, str):
        return [path for part in spec for path in split_paths(part)]
    if Path(parse_slice(spec)[0]).exists():
        return [spec]
    return [part for part in (p.strip() for p in spec.split(",")) if part]


def parse_slice(spec: str) -> tuple[str, slice]:
    """`file@[a:b]` -> (file, slice(a, b)); both ends optional, negative ones count from the end."""
    match = _SLICE.match(spec)
    if match is None:
        return spec, slice(None)
    start, stop = (int(match[name]) if match[name] not in ("", "-") else None for name in ("start", "stop"))
    return match["path"], slice(start, stop)


def _read_file(spec: str, problems: _Problems) -> list[_RawRow]:
    path, part = parse_slice(spec)
    file = Path(path)
    if not file.is_file():
        raise DatasetError(
            f"prompt data {path}: no such file (--prompt-data takes files, an optional slice is path@[a:b])"
        )
    readers = {".jsonl": _read_jsonl, ".json": _read_json, ".parquet": _read_parquet}
    if file.suffix not in readers:
        raise DatasetError(f"prompt data {path}: unknown format {file.suffix!r}; use .jsonl, .json or .parquet")
    return readers[file.suffix](file, part, problems)


def _read_jsonl(file: Path, part: slice, problems: _Problems) -> list[_RawRow]:
    with open(file, encoding="utf-8") as f:
        lines = [(number, line) for number, line in enumerate(f, start=1) if line.strip()]
    return [row for number, text in lines[part] if (row := _parse_row(str(file), number, text, problems)) is not None]


def _read_json(file: Path, part: slice, problems: _Problems) -> list[_RawRow]:
    text = file.read_text(encoding="utf-8")
    try:
        elements = list(_array_elements(text))
    except ValueError as error:
        raise DatasetError(f"prompt data {file}: not a JSON array of rows: {error}") from None
    numbered = list(enumerate(elements, start=1))[part]
    return [row for number, text in numbered if (row := _parse_row(str(file), number, text, problems)) is not None]


def _parse_row(file: str, number: int, text: str, problems: _Problems) -> _RawRow | None:
    try:
        fields = json.loads(text)
    except json.JSONDecodeError as error:
        problems.add(file, number, f"not JSON: {error.msg} at column {error.colno}")
        return None
    if not isinstance(fields, dict):
        problems.add(file, number, f"a row must be a JSON object, not a {type(fields).__name__}")
        return None
    return _RawRow(file, number, fields, text)


def _read_parquet(file: Path, part: slice, problems: _Problems) -> list[_RawRow]:
    import pyarrow.parquet

    try:
        rows = pyarrow.parquet.read_table(file).to_pylist()
    except Exception as error:
        raise DatasetError(f"prompt data {file}: not a readable parquet file: {error}") from error
    return [_RawRow(str(file), number, fields, None) for number, fields in list(enumerate(rows, start=1))[part]]


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


def _field_text(text: str, key: str) -> str:
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


# ---- rows --------------------------------------------------------------------------------------------------------


def _label_of(row: _RawRow, key: str | None) -> str | None:
    """The label as a string: what the file says, to the letter (`1.0`, `007`, `1e3` are never turned into numbers)."""
    value = None if key is None else row.fields[key]
    if value is None or isinstance(value, str):
        return value
    return json.dumps(value, ensure_ascii=False) if row.text is None else _field_text(row.text, key)  # type: ignore[arg-type]


def _clean_messages(messages: list[dict]) -> list[dict]:
    """Without the null fields that a parquet struct gives to messages that lack them."""
    return [{k: v for k, v in m.items() if v is not None or k == "content"} for m in messages]


def _prompt_of(row: _RawRow, key: str) -> Prompt:
    if key not in row.fields:
        raise ValueError(f"no field {key!r} (it has {', '.join(sorted(row.fields))}); set --input-key")
    prompt = row.fields[key]
    if prompt is None:
        raise ValueError(f"{key!r} is null")
    if isinstance(prompt, str):
        if not prompt:
            raise ValueError(f"{key!r} is empty")
        return prompt
    if not isinstance(prompt, list) or not prompt or not all(isinstance(m, dict) and "role" in m for m in prompt):
        raise ValueError(f"{key!r} must be a string or a list of messages with roles, not {str(prompt)[:60]!r}")
    return _clean_messages(prompt)


def _json_or(value: Any, kind: type, key: str) -> Any:
    """A dict or list that some data sets store as JSON text."""
    if isinstance(value, str):
        try:
            value = json.loads(value) if value.strip() else None
        except json.JSONDecodeError as error:
            raise ValueError(f"{key!r} is a string that is not JSON: {error.msg}") from None
    if value is None:
        return None
    if not isinstance(value, kind):
        raise ValueError(f"{key!r} must be a {kind.__name__} (or its JSON text), not a {type(value).__name__}")
    return value


def _prompt_row(row: _RawRow, keys: DatasetKeys, render: Any, count: Any) -> PromptRow:
    prompt = _prompt_of(row, keys.input)
    if keys.label is not None and keys.label not in row.fields:
        raise ValueError(f"no field {keys.label!r}; set --label-key")
    label = _label_of(row, keys.label)
    metadata = dict(_json_or(row.fields.get(keys.metadata), dict, keys.metadata) or {})
    tools = _json_or(row.fields.get(keys.tools), list, keys.tools)
    if tools:
        metadata["tools"] = tools
    prompt = render(prompt, tools)
    return PromptRow(prompt, label, metadata, count(prompt, tools), f"{row.file} row {row.number}")


def load_prompt_rows(
    args: Any,
    spec: str | Sequence[str],
    keys: DatasetKeys,
    tokenizer: Any,
    *,
    max_prompt_len: int | None = None,
) -> tuple[list[PromptRow], int]:
    """Read and check every row, apply the chat template, and drop prompts longer than `max_prompt_len` tokens.

    Returns: rows in file order, and how many were dropped for their length.
    Raises: DatasetError with every bad row, or when no row is left.
    """
    problems = _Problems()
    raw = [row for path in split_paths(spec) for row in _read_file(path, problems)]
    kwargs = chat_template_kwargs(args)
    templated = getattr(args, "apply_chat_template", False)

    def render(prompt: Prompt, tools: list[dict] | None) -> Prompt:
        if not templated:
            return prompt
        messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
        return render_chat(tokenizer, messages, tools=tools, kwargs=kwargs)

    def count(prompt: Prompt, tools: list[dict] | None) -> int | None:
        return None if max_prompt_len is None else len(encode_prompt(args, tokenizer, prompt, tools))

    rows = []
    for row in raw:
        try:
            rows.append(_prompt_row(row, keys, render, count))
        except ValueError as error:
            problems.add(row.file, row.number, str(error))
    problems.raise_if_any()
    kept = [row for row in rows if max_prompt_len is None or row.length <= max_prompt_len]  # type: ignore[operator]
    if not rows:
        raise DatasetError(f"prompt data {spec}: no rows (is the slice beyond the end of the file?)")
    if not kept:
        shortest = min(row.length for row in rows)  # type: ignore[type-var]
        raise DatasetError(
            f"prompt data {spec}: all {len(rows)} prompts are longer than {max_prompt_len} tokens (the shortest has "
            f"{shortest}). Raise --rollout-max-prompt-len."
        )
    return kept, len(rows) - len(kept)
