"""Which data sets are evaluated, and how: `--eval-prompt-data`, or `--eval-config` with overrides for each set.

eval:
  defaults: {n_samples_per_eval_prompt: 4, temperature: 0.6}
  datasets:
    - {name: aime, path: aime.jsonl, rm_type: deepscaler}
    - {name: gpqa, path: gpqa.parquet, n_samples_per_eval_prompt: 1, metadata_overrides: {split: diamond}}
"""

from __future__ import annotations

import base64
import binascii
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import yaml


@dataclass(frozen=True)
class EvalDatasetConfig:
    """One evaluation data set; every field but `name` and `path` has the run's value where the file gives none."""

    name: str
    path: str
    rm_type: str | None = None
    input_key: str = "input"
    label_key: str | None = None
    tool_key: str = "tools"
    metadata_key: str = "metadata"
    n_samples_per_eval_prompt: int = 1
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    max_response_len: int | None = None
    max_prompt_len: int | None = None
    stop: list[str] | str | None = None
    stop_token_ids: list[int] | None = None
    min_new_tokens: int | None = None
    custom_generate_function_path: str | None = None
    metadata_overrides: dict[str, Any] = field(default_factory=dict)

    def sampling_params(self, base: dict[str, Any]) -> dict[str, Any]:
        """The run's parameters with this data set's own on top."""
        own = {"temperature": self.temperature, "top_p": self.top_p, "top_k": self.top_k}
        own |= {"max_new_tokens": self.max_response_len or base["max_new_tokens"]}
        optional = {"stop": self.stop, "stop_token_ids": self.stop_token_ids, "min_new_tokens": self.min_new_tokens}
        return {**base, **own, **{k: v for k, v in optional.items() if v is not None}}


def _first(*values: Any) -> Any:
    return next((value for value in values if value is not None), None)


def _run_defaults(args: Any) -> dict[str, Any]:
    def get(name: str) -> Any:
        return getattr(args, name, None)

    return {
        "input_key": _first(get("eval_input_key"), get("input_key"), "input"),
        "label_key": _first(get("eval_label_key"), get("label_key")),
        "tool_key": _first(get("eval_tool_key"), get("tool_key"), "tools"),
        "metadata_key": _first(get("metadata_key"), "metadata"),
        "n_samples_per_eval_prompt": _first(get("n_samples_per_eval_prompt"), 1),
        "temperature": _first(get("eval_temperature"), get("rollout_temperature"), 1.0),
        "top_p": _first(get("eval_top_p"), get("rollout_top_p"), 1.0),
        "top_k": _first(get("eval_top_k"), get("rollout_top_k"), -1),
        "max_response_len": _first(get("eval_max_response_len"), get("rollout_max_response_len")),
        "max_prompt_len": _first(get("eval_max_prompt_len"), get("rollout_max_prompt_len")),
        "min_new_tokens": get("eval_min_new_tokens"),
    }


def _read_config(source: str) -> Any:
    if source.startswith("base64:"):
        try:
            return yaml.safe_load(base64.b64decode(source.removeprefix("base64:"), validate=True))
        except (binascii.Error, yaml.YAMLError, UnicodeDecodeError) as error:
            raise ValueError(f"--eval-config base64:...: cannot be decoded: {error}") from None
    file = Path(source)
    if not file.is_file():
        raise ValueError(f"--eval-config {source}: no such file")
    try:
        return yaml.safe_load(file.read_text(encoding="utf-8"))  # JSON is YAML too
    except yaml.YAMLError as error:
        raise ValueError(f"--eval-config {source}: not YAML or JSON: {error}") from None


def _from_file(args: Any, source: str) -> list[EvalDatasetConfig]:
    config = _read_config(source)
    section = config.get("eval", config) if isinstance(config, dict) else None
    if not isinstance(section, dict) or not isinstance(section.get("datasets"), list) or not section["datasets"]:
        raise ValueError(f"--eval-config {source}: expected `eval: {{defaults: ..., datasets: [{{name, path, ...}}]}}`")
    known = {f.name for f in fields(EvalDatasetConfig)}
    defaults = section.get("defaults") or {}
    problems = [f"defaults: unknown key {key!r}" for key in sorted(set(defaults) - known)]
    problems += [f"unknown section {key!r}" for key in sorted(set(section) - {"defaults", "datasets"})]
    for i, dataset in enumerate(section["datasets"]):
        where = f"datasets[{i}]"
        if not isinstance(dataset, dict):
            problems.append(f"{where}: a mapping is needed, not {dataset!r}")
            continue
        problems += [f"{where}: {key!r} is missing" for key in ("name", "path") if not dataset.get(key)]
        problems += [f"{where}: unknown key {key!r}" for key in sorted(set(dataset) - known)]
    if problems:
        raise ValueError(f"--eval-config {source}: " + "; ".join(problems))
    base = _run_defaults(args)
    return [EvalDatasetConfig(**{**base, **defaults, **dataset}) for dataset in section["datasets"]]


def load_eval_configs(args: Any) -> list[EvalDatasetConfig]:
    """The evaluation data sets of a run; empty when it has none. `--eval-config` wins over `--eval-prompt-data`.

    Raises: ValueError that lists everything wrong with the file or the flag.
    """
    if getattr(args, "eval_config", None):
        configs = _from_file(args, args.eval_config)
    else:
        pairs = list(getattr(args, "eval_prompt_data", None) or [])
        if len(pairs) == 1:
            pairs = ["aime", *pairs]
        if len(pairs) % 2:
            raise ValueError(f"--eval-prompt-data takes pairs NAME PATH, got {len(pairs)} values: {' '.join(pairs)}")
        base = _run_defaults(args)
        configs = [EvalDatasetConfig(name=n, path=p, **base) for n, p in zip(pairs[::2], pairs[1::2], strict=True)]
    names = [config.name for config in configs]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise ValueError(f"evaluation data sets need names of their own; given twice: {', '.join(twice)}")
    return configs
