"""From prompt files to prompts: columns, chat template, lengths; all bad rows are told at once.

`load_prompt_rows` reads everything for a run. `look_at_prompt_rows` is what can be found out before it starts.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from miles.rollout.eval_config import EvalDatasetConfig
from miles.rollout.prompt_files import DatasetError, Problems, RawRow, field_text, read_rows, split_paths
from miles.rollout.prompts import Prompt, chat_template_kwargs, encode_prompt, render_chat

_HEAD_BYTES = 4 << 20  # of a larger file, a look sees this much


@dataclass(frozen=True)
class DatasetKeys:
    """Column names: prompt, label, metadata, tools; and what sets the first two, and names the data, in messages."""

    input: str = "input"
    label: str | None = None
    metadata: str = "metadata"
    tools: str = "tools"
    set_input: str = "--input-key"
    set_label: str = "--label-key"
    option: str = "--prompt-data"

    @classmethod
    def of_run(cls, args: Any) -> DatasetKeys:
        return cls(
            input=getattr(args, "input_key", "input"),
            label=getattr(args, "label_key", None),
            metadata=getattr(args, "metadata_key", "metadata"),
            tools=getattr(args, "tool_key", "tools"),
        )

    @classmethod
    def of_eval(cls, args: Any, config: EvalDatasetConfig) -> DatasetKeys:
        columns = (config.input_key, config.label_key, config.metadata_key, config.tool_key)
        if getattr(args, "eval_config", None):
            return cls(*columns, "its input_key", "its label_key", f"--eval-config {config.name}")
        return cls(*columns, "--eval-input-key", "--eval-label-key", f"--eval-prompt-data {config.name}")


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


# ---- rows --------------------------------------------------------------------------------------------------------


def _field_of(row: RawRow, key: str, how_to_set: str) -> Any:
    if key not in row.fields:
        raise ValueError(f"no field {key!r} (it has {', '.join(sorted(row.fields)) or 'none'}); set {how_to_set}")
    return row.fields[key]


def _label_of(row: RawRow, keys: DatasetKeys) -> str | None:
    """The label as a string: what the file says, to the letter (`1.0`, `007`, `1e3` are never turned into numbers)."""
    if keys.label is None:
        return None
    value = _field_of(row, keys.label, keys.set_label)
    if value is None or isinstance(value, str):
        return value
    return json.dumps(value, ensure_ascii=False) if row.text is None else field_text(row.text, keys.label)


def _clean_messages(messages: list[dict]) -> list[dict]:
    """Without the null fields that a parquet struct gives to messages that lack them."""
    return [{k: v for k, v in m.items() if v is not None or k == "content"} for m in messages]


def _prompt_of(row: RawRow, keys: DatasetKeys) -> Prompt:
    key, prompt = keys.input, _field_of(row, keys.input, keys.set_input)
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


Render = Callable[[Prompt, list[dict] | None], Prompt]
Count = Callable[[Prompt, list[dict] | None], int | None]


def _prompt_row(row: RawRow, keys: DatasetKeys, render: Render, count: Count) -> PromptRow:
    prompt, label = _prompt_of(row, keys), _label_of(row, keys)
    metadata = dict(_json_or(row.fields.get(keys.metadata), dict, keys.metadata) or {})
    tools = _json_or(row.fields.get(keys.tools), list, keys.tools)
    if tools:
        metadata["tools"] = tools
    prompt = render(prompt, tools)
    return PromptRow(prompt, label, metadata, count(prompt, tools), f"{row.file} row {row.number}")


def _prompt_rows(
    raw: Sequence[RawRow], keys: DatasetKeys, problems: Problems, render: Render, count: Count
) -> list[PromptRow]:
    """Raises: DatasetError with every bad row, those that `problems` has already among them."""
    rows = []
    for row in raw:
        try:
            rows.append(_prompt_row(row, keys, render, count))
        except ValueError as error:
            problems.add(row.file, row.number, str(error))
    problems.raise_if_any()
    return rows


def _no_rows(spec: str | Sequence[str], keys: DatasetKeys) -> DatasetError:
    return DatasetError(f"{keys.option} {spec}: no rows (is the slice beyond the end of the file?)")


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
    problems = Problems(keys.option)
    raw = [row for path in split_paths(spec) for row in read_rows(path, problems).rows]
    kwargs = chat_template_kwargs(args)
    templated = getattr(args, "apply_chat_template", False)

    def render(prompt: Prompt, tools: list[dict] | None) -> Prompt:
        if not templated:
            return prompt
        messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
        return render_chat(tokenizer, messages, tools=tools, kwargs=kwargs)

    def count(prompt: Prompt, tools: list[dict] | None) -> int | None:
        return None if max_prompt_len is None else len(encode_prompt(args, tokenizer, prompt, tools))

    rows = _prompt_rows(raw, keys, problems, render, count)
    kept = [row for row in rows if max_prompt_len is None or row.length <= max_prompt_len]  # type: ignore[operator]
    if not rows:
        raise _no_rows(spec, keys)
    if not kept:
        shortest = min(row.length for row in rows)  # type: ignore[type-var]
        raise DatasetError(
            f"{keys.option} {spec}: all {len(rows)} prompts are longer than {max_prompt_len} tokens (the shortest has "
            f"{shortest}). Raise --rollout-max-prompt-len."
        )
    return kept, len(rows) - len(kept)


# ---- a look before the run ---------------------------------------------------------------------------------------


def look_at_prompt_rows(spec: str | Sequence[str], keys: DatasetKeys) -> tuple[list[PromptRow], list[str]]:
    """The rows as far as they can be had in a moment: without tokenizer and template, and of large files the first ones.

    Returns: rows, and what is wrong, one message a file.
    """
    rows: list[PromptRow] = []
    wrong: list[str] = []
    whole = True
    for path in split_paths(spec):
        problems = Problems(keys.option)
        try:
            raw = read_rows(path, problems, head=_HEAD_BYTES)
            rows += _prompt_rows(raw.rows, keys, problems, lambda prompt, tools: prompt, lambda prompt, tools: None)
            whole &= raw.whole
        except DatasetError as error:
            wrong.append(str(error))
    if whole and not rows and not wrong:
        wrong.append(str(_no_rows(spec, keys)))
    return rows, wrong


def columns_of(spec: str | Sequence[str]) -> list[str]:
    """Names of the fields of the first row; none where there is no readable one."""
    for path in split_paths(spec):
        try:
            rows = read_rows(path, Problems(""), head=1 << 16).rows
        except DatasetError:
            continue
        if rows:
            return sorted(rows[0].fields)
    return []
