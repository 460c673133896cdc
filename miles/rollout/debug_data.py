"""Rollout data on disk, for debugging: samples of a rollout to look at, or to train on again without engines."""

from __future__ import annotations

import io
import itertools
import logging
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import orjson
import torch

from miles.rollout.failures import flatten
from miles.rollout.prompts import shared_tokenizer
from miles.utils.atomic_io import write_atomic
from miles.utils.types import Sample

logger = logging.getLogger(__name__)


class DebugDataError(ValueError):
    """A debug data file that is missing or holds something else."""


def _path(flag: str, template: str, rollout_id: int, *, evaluation: bool = False) -> Path:
    try:
        path = Path(template.format(rollout_id=rollout_id))
    except (KeyError, IndexError, ValueError) as error:
        raise DebugDataError(f"{flag} {template}: only {{rollout_id}} can be filled in ({error})") from None
    return path.with_name(f"eval_{path.name}") if evaluation else path


# ---- saving ----------------------------------------------------------------------------------------------------------


def save_debug_rollout(
    args: Any, rollout_id: int, samples: list[Sample], metadata: dict[str, Any] | None = None
) -> None:
    """Write `--save-debug-rollout-data` and `--save-debug-trajectory-data`, where they are set."""
    _save(args, rollout_id, samples, metadata, evaluation=False)


def save_debug_eval(args: Any, rollout_id: int, data: dict[str, dict[str, list]]) -> None:
    """The same for an evaluation; its files are named `eval_...` and its samples carry their data set's name."""
    samples = []
    for name, result in data.items():
        for sample in flatten(result.get("samples", [])):
            sample.metadata.setdefault("eval_dataset", name)
            samples.append(sample)
    _save(args, rollout_id, samples, None, evaluation=True)


def _save(
    args: Any, rollout_id: int, samples: list[Sample], metadata: dict[str, Any] | None, *, evaluation: bool
) -> None:
    template = getattr(args, "save_debug_rollout_data", None)
    if template:
        payload = {
            "rollout_id": rollout_id,
            "metadata": metadata or {},
            "samples": [sample.to_dict() for sample in samples],
        }
        buffer = io.BytesIO()
        torch.save(payload, buffer)
        write_atomic(_path("--save-debug-rollout-data", template, rollout_id, evaluation=evaluation), buffer.getvalue())
    template = getattr(args, "save_debug_trajectory_data", None)
    if template:
        records = [trajectory(args, rollout_id, sample) for sample in samples]
        lines = [orjson.dumps(record, default=str, option=orjson.OPT_SERIALIZE_NUMPY) for record in records]
        path = _path("--save-debug-trajectory-data", template, rollout_id, evaluation=evaluation)
        write_atomic(path, b"".join(line + b"\n" for line in lines))


def trajectory(args: Any, rollout_id: int, sample: Sample) -> dict[str, Any]:
    """A sample as messages with roles, for people to read: `assistant` was sampled, `environment` was not."""
    prompt = sample.prompt
    messages = [{"role": "prompt", "content": prompt}] if isinstance(prompt, str) else list(prompt)
    return {
        "rollout_id": rollout_id,
        "group_index": sample.group_index,
        "index": sample.index,
        "status": sample.status.value,
        "reward": sample.reward,
        "label": sample.label,
        "response_length": sample.response_length,
        "version_spans": [(s.version, s.start, s.end) for s in sample.version_spans],
        "failure": None if sample.failure is None else vars(sample.failure),
        "messages": [*messages, *_response_messages(args, sample)],
        "metadata": sample.metadata,
    }


def _response_messages(args: Any, sample: Sample) -> list[dict[str, str]]:
    """The response, cut where sampled tokens (those with a weight version) and environment tokens meet."""
    if not sample.version_spans or not sample.loss_mask or all(sample.loss_mask):
        return [{"role": "assistant", "content": sample.response}]
    sampled = [False] * sample.response_length
    for span in sample.version_spans:
        sampled[span.start : span.end] = [True] * (span.end - span.start)
    tokenizer, tokens = shared_tokenizer(args), sample.tokens[len(sample.tokens) - sample.response_length :]
    parts = itertools.groupby(zip(sampled, tokens, strict=True), key=lambda pair: pair[0])
    return [
        {"role": "assistant" if own else "environment", "content": tokenizer.decode([token for _, token in pairs])}
        for own, pairs in parts
    ]


# ---- loading ---------------------------------------------------------------------------------------------------------


def load_debug_rollout(args: Any, rollout_id: int) -> list[Sample]:
    """The samples of `--load-debug-rollout-data`, cut to whole groups by `--load-debug-rollout-data-subsample`.

    Raises: DebugDataError that names the file and what is wrong with it.
    """
    path = _path("--load-debug-rollout-data", args.load_debug_rollout_data, rollout_id)
    if not path.is_file():
        raise DebugDataError(f"--load-debug-rollout-data: {path} does not exist (rollout {rollout_id})")
    try:
        # A file of the user's own; samples hold arrays and free metadata, so the full unpickler is needed.
        payload = torch.load(path, map_location="cpu", weights_only=False)
        samples = [Sample.from_dict(entry) for entry in payload["samples"]]
    except Exception as error:
        raise DebugDataError(f"{path} is no saved rollout: {type(error).__name__}: {error}") from error
    ratio = getattr(args, "load_debug_rollout_data_subsample", None)
    return samples if ratio is None else subsample_groups(samples, ratio)


def subsample_groups(samples: Iterable[Sample], ratio: float) -> list[Sample]:
    """The first share `ratio` of the groups (at least one), whole: part of a group would have another baseline."""
    if not 0 < ratio <= 1:
        raise DebugDataError(f"--load-debug-rollout-data-subsample {ratio}: must be above 0 and at most 1")
    groups: dict[Any, list[Sample]] = {}
    for position, sample in enumerate(samples):
        groups.setdefault(position if sample.group_index is None else sample.group_index, []).append(sample)
    kept = list(groups.values())[: max(1, round(len(groups) * ratio))]
    logger.info("training on %d of %d saved groups", len(kept), len(groups))
    return [sample for group in kept for sample in group]
