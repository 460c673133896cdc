"""Samples to train data: checked once more, one entry a sample in every column, arrays where the trainer wants arrays."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from miles.backends.training_utils.backend import TrainData
from miles.backends.training_utils.loss_hub.rewards import post_process_rewards
from miles.backends.training_utils.replay.expert_layout import RouteError
from miles.rollout.prompts import expert_layout
from miles.utils.imports import load_function
from miles.utils.types import Sample, SampleStatus

_LISTED = 10
ROUTES = "rollout_routed_experts"


class TrainDataError(ValueError):
    """Samples that break the token contract or do not fit together; names each by its index."""


def _raise_if_any(problems: list[str]) -> None:
    if problems:
        more = f"\n  ... and {len(problems) - _LISTED} more" if len(problems) > _LISTED else ""
        raise TrainDataError(f"{len(problems)} problems in the batch:\n  " + "\n  ".join(problems[:_LISTED]) + more)


def check_token_contract(samples: Sequence[Sample]) -> None:
    """Every per-token field of every sample has the length that its tokens ask for, and ids and masks are sane.

    Raises: TrainDataError that names all samples that are refused.
    """
    problems = []
    # Values are looked at all together; sample by sample only where that finds something.
    tokens_sound = _are_token_ids([sample.tokens for sample in samples])
    masks_sound = _are_masks([sample.loss_mask for sample in samples if sample.loss_mask is not None])
    scores_sound = _are_finite([s.rollout_log_probs for s in samples if s.rollout_log_probs is not None])
    for sample in samples:
        try:
            sample.validate()
        except ValueError as error:
            problems.append(str(error))
            continue
        where = f"sample {sample.index}"
        if sample.response_length == 0:
            problems.append(f"{where}: no response tokens")
        elif sample.response_length == len(sample.tokens):
            problems.append(f"{where}: no prompt tokens, so its first response token cannot be scored")
        if not tokens_sound and not _are_token_ids([sample.tokens]):
            problems.append(f"{where}: tokens are not all token ids")
        if not masks_sound and sample.loss_mask is not None and not _are_masks([sample.loss_mask]):
            problems.append(f"{where}: loss_mask has values other than 0 and 1")
        if not scores_sound and sample.rollout_log_probs is not None and not _are_finite([_trained_scores(sample)]):
            problems.append(f"{where}: rollout_log_probs has values that are not finite at tokens that train")
    _raise_if_any(problems)


def _are_token_ids(sequences: Sequence[Any]) -> bool:
    # A sequence without tokens has another problem, which `validate` and the lengths tell.
    ids = np.concatenate([np.asarray(sequence) for sequence in sequences if len(sequence)] or [np.zeros(1, np.int32)])
    return ids.dtype.kind in "iu" and int(ids.min()) >= 0 and int(ids.max()) < 2**31


def _are_masks(sequences: Sequence[Any]) -> bool:
    values = np.concatenate([np.asarray(sequence) for sequence in sequences] or [np.zeros(0)])
    return bool(((values == 0) | (values == 1)).all())


def _trained_scores(sample: Sample) -> np.ndarray:
    """Engine log-probs of the tokens that train; what is masked may be anything."""
    scores = np.zeros(0, np.float32) if sample.rollout_log_probs is None else _f32(sample.rollout_log_probs)
    return scores[_loss_mask(sample) > 0]


def _are_finite(sequences: Sequence[Any]) -> bool:
    return bool(np.isfinite(np.concatenate([_f32(sequence) for sequence in sequences] or [np.zeros(0)])).all())


# ---- columns ---------------------------------------------------------------------------------------------------------


def _f32(values: Sequence[float]) -> np.ndarray:
    return np.asarray(values, dtype=np.float32)


def _i32(values: Any) -> np.ndarray:
    return np.asarray(values, dtype=np.int32)


# Optional columns, and how one entry is converted. All samples have the field, or none has.
_OPTIONAL: dict[str, Callable[[Any], np.ndarray]] = {
    "rollout_log_probs": _f32,
    "teacher_log_probs": _f32,
    "opd_reverse_kl": _f32,
    "rollout_indexer_topk": _i32,
}


def _all_or_none(name: str, values: Sequence[Any], samples: Sequence[Sample]) -> str | None:
    """The problem text where some samples have `name` and others lack it."""
    lacking = [sample.index for sample, value in zip(samples, values, strict=True) if value is None]
    if not lacking or len(lacking) == len(samples):
        return None
    shown = ", ".join(map(str, lacking[:_LISTED])) + (", ..." if len(lacking) > _LISTED else "")
    return f"{name}: {len(samples) - len(lacking)} samples have it, {len(lacking)} lack it (samples {shown}); all or none must"


def _loss_mask(sample: Sample) -> np.ndarray:
    if sample.remove_sample:
        return np.zeros(sample.response_length, dtype=np.int32)
    return _i32([1] * sample.response_length if sample.loss_mask is None else sample.loss_mask)


def _rollout_ids(samples: Sequence[Sample]) -> list[int]:
    missing = [position for position, sample in enumerate(samples) if sample.execution_id is None]
    if missing:
        raise TrainDataError(f"samples at positions {missing[:_LISTED]} have neither rollout_id nor index")
    return [sample.execution_id for sample in samples]  # type: ignore[misc]


def _mask_sums(rollout_ids: Sequence[int], masks: Sequence[np.ndarray]) -> list[int]:
    """Trained tokens of the whole rollout that a sample belongs to, siblings included."""
    sums: dict[int, int] = {}
    for rollout_id, mask in zip(rollout_ids, masks, strict=True):
        sums[rollout_id] = sums.get(rollout_id, 0) + int(mask.sum())
    return [sums[rollout_id] for rollout_id in rollout_ids]


def _rewards(args: Any, samples: Sequence[Sample]) -> tuple[list[float], list[float]]:
    """(raw rewards, rewards that train), by the hook or by group normalisation; both finite."""
    if not getattr(args, "custom_reward_post_process_path", None):
        _check_finite("reward", [sample.get_reward_value(args) for sample in samples], samples)
    raw, rewards = post_process_rewards(args, samples)
    _check_finite("reward", raw, samples)
    _check_finite("normalised reward", rewards, samples)
    return [float(r) for r in raw], [float(r) for r in rewards]


def _check_finite(what: str, values: Sequence[Any], samples: Sequence[Sample]) -> None:
    problems = []
    for sample, value in zip(samples, values, strict=True):
        try:
            good = value is not None and math.isfinite(value)
        except TypeError:
            good = False
        if not good:
            hint = "; set --reward-key" if isinstance(value, dict) else ""
            problems.append(f"sample {sample.index}: {what} is {value!r}, not a finite number{hint}")
    _raise_if_any(problems)


def _optional_columns(samples: Sequence[Sample]) -> TrainData:
    columns: TrainData = {}
    problems = []
    for name, convert in _OPTIONAL.items():
        values = [getattr(sample, name) for sample in samples]
        problem = _all_or_none(name, values, samples)
        if problem:
            problems.append(problem)
        elif values[0] is not None:
            columns[name] = [convert(value) for value in values]
    rounds = [sample.metadata.get("round_number") for sample in samples]
    problem = _all_or_none("metadata.round_number", rounds, samples)
    if problem:
        problems.append(problem)
    elif rounds[0] is not None:
        columns["round_number"] = rounds
    _raise_if_any(problems)
    for name, attribute in (("metadata", "train_metadata"), ("multimodal_train_inputs", "multimodal_train_inputs")):
        values = [getattr(sample, attribute) for sample in samples]
        if any(value is not None for value in values):
            columns[name] = values
    if any(sample.weight_versions for sample in samples):
        columns["weight_versions"] = [list(sample.weight_versions) for sample in samples]
    return columns


def _routes(args: Any, samples: Sequence[Sample]) -> list[np.ndarray | None]:
    """Each sample's routes `[tokens - 1, moe layers, topk]`, all in one type; None for a sample that came without.

    Raises: TrainDataError that names every sample whose routes are not those of this model.
    """
    layout = expert_layout(args)
    found: list[np.ndarray | None] = []
    problems = []
    for sample in samples:
        try:
            routes = sample.rollout_routed_experts
            found.append(None if routes is None else layout.compact(routes))
        except RouteError as error:
            problems.append(f"sample {sample.index}: rollout_routed_experts: {error}")
    _raise_if_any(problems)
    absent = any(routes is not None and routes.dtype.kind == "i" for routes in found)
    dtype = layout.dtype(with_absent=absent)
    return [None if routes is None else routes.astype(dtype, copy=False) for routes in found]


def convert_samples_to_train_data(
    args: Any, samples: Sequence[Sample], metadata: dict[str, Any] | None = None
) -> TrainData:
    """The columns that the trainer gets: lists with one entry a sample.

    `tokens` int32 [tokens], `loss_masks` int32 [response], `rollout_log_probs` float32 [response] and so on are numpy arrays;
    With `--use-rollout-routing-replay`, `rollout_routed_experts` is `[tokens - 1, moe layers, topk]` in the smallest integer
    type that holds the experts, or None for a sample that came without routes; a missing row holds -1.
    `version_spans` has a list of (version, start, end) over response tokens for each sample, empty where the engine
    reported no version.

    Args:
        metadata: what `postprocess_rollout` returned beside the samples.
    Raises: TrainDataError that names every sample that is refused.
    """
    path = getattr(args, "custom_convert_samples_to_train_data_path", None)
    if path:
        return load_function(path)(args, samples)
    check_token_contract(samples)
    raw, rewards = _rewards(args, samples)
    masks = [_loss_mask(sample) for sample in samples]
    rollout_ids = _rollout_ids(samples)
    columns: TrainData = {
        "tokens": [_i32(sample.tokens) for sample in samples],
        "loss_masks": masks,
        "response_lengths": [sample.response_length for sample in samples],
        "total_lengths": [len(sample.tokens) for sample in samples],
        "rewards": rewards,
        "raw_reward": [s.metadata.get("raw_reward", r) for s, r in zip(samples, raw, strict=True)],
        "truncated": [int(sample.status is SampleStatus.TRUNCATED) for sample in samples],
        "sample_indices": [sample.index for sample in samples],
        "rollout_ids": rollout_ids,
        "rollout_mask_sums": _mask_sums(rollout_ids, masks),
        "prompt": [sample.prompt for sample in samples],
        "version_spans": [[(s.version, s.start, s.end) for s in sample.version_spans] for sample in samples],
    }
    columns |= _optional_columns(samples)
    if getattr(args, "use_rollout_routing_replay", False):
        columns[ROUTES] = _routes(args, samples)
    if metadata and "dynamic_global_batch_size" in metadata:
        columns["dynamic_global_batch_size"] = metadata["dynamic_global_batch_size"]
    return columns
