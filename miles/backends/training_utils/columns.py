"""The columns of train data: their checks at the trainer's door, and one micro-batch of them as tensors."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from miles.backends.training_utils.backend import TrainData
from miles.backends.training_utils.batching.shards import FILLERS
from miles.backends.training_utils.loss_hub.reducers import RolloutMean

# Columns with one float for every response token.
RESPONSE_COLUMNS = (
    "log_probs",
    "old_actor_log_probs",
    "ref_log_probs",
    "rollout_log_probs",
    "teacher_log_probs",
    "opd_reverse_kl",
    "advantages",
    "returns",
    "values",
    "entropy",
)


class ColumnError(ValueError):
    """Train data whose columns disagree about their tokens. Never trained on."""


def check_columns(columns: TrainData) -> None:
    """Refuse train data in which any per-token field disagrees with its sample's tokens.

    Raises: ColumnError naming every sample and field that disagree, all at once.
    """
    needed = ("tokens", "total_lengths", "response_lengths", "loss_masks")
    missing = [name for name in needed if name not in columns]
    if missing:
        raise ColumnError(f"train data lacks the columns {', '.join(missing)}")
    count = len(columns["tokens"])
    wrong = []
    for i in range(count):
        total, response = int(columns["total_lengths"][i]), int(columns["response_lengths"][i])
        if len(columns["tokens"][i]) != total:
            wrong.append(f"sample {i}: {len(columns['tokens'][i])} tokens, total_lengths says {total}")
        if not 0 <= response < total:
            wrong.append(f"sample {i}: response of {response} tokens in {total}, and a prompt needs at least one")
        for name in ("loss_masks", *RESPONSE_COLUMNS):
            column = columns.get(name)
            if column is not None and column[i] is not None and len(column[i]) != response:
                wrong.append(f"sample {i}: {name} has {len(column[i])} entries for {response} response tokens")
        routes = columns.get("rollout_routed_experts")
        if routes is not None and routes[i] is not None and len(routes[i]) != total - 1:
            wrong.append(f"sample {i}: rollout_routed_experts has {len(routes[i])} rows for {total} tokens")
        end = 0
        for version, start, stop in _spans(columns, i):
            if not end <= start < stop <= response:
                wrong.append(f"sample {i}: version {version} spans [{start}, {stop}) of {response} response tokens")
            end = stop
    if wrong:
        shown = "; ".join(wrong[:20]) + (f"; and {len(wrong) - 20} more" if len(wrong) > 20 else "")
        raise ColumnError(f"train data refused: {shown}")


def _spans(columns: TrainData, index: int) -> Iterable[tuple[int, int, int]]:
    """Version spans of a sample as (version, start, end); they come as `VersionSpan` or as plain triples."""
    spans = columns.get("version_spans")
    for span in (spans[index] if spans is not None else None) or ():
        if hasattr(span, "version"):
            yield span.version, span.start, span.end
        else:
            version, start, end = span
            yield int(version), int(start), int(end)


@dataclass(frozen=True)
class MicroBatch:
    """Response-aligned tensors of one micro-batch, fp32, one entry a sample in every list; R: response tokens in all.

    Optional columns are None where the train data has none. `mask` `[R]` is 1.0 at tokens that train.
    """

    columns: dict[str, list[Any]]
    response_lengths: list[int]
    total_lengths: list[int]
    loss_masks: list[Tensor]
    rollout_mask_sums: list[float]
    fillers: list[bool]
    reducer: RolloutMean
    num_spanned: int  # trainable tokens that carry a weight version

    @classmethod
    def from_columns(
        cls, args: Any, columns: TrainData, indices: Sequence[int], device: torch.device | str = "cpu"
    ) -> MicroBatch:
        """Take the samples `indices` out of a shard's columns."""
        local: dict[str, list[Any]] = {}
        for name, column in columns.items():
            values = [column[i] for i in indices]
            if name in RESPONSE_COLUMNS and all(v is not None for v in values):
                values = [torch.as_tensor(v, dtype=torch.float32, device=device).detach() for v in values]
            local[name] = values
        masks = [torch.as_tensor(m, dtype=torch.float32, device=device) for m in local["loss_masks"]]
        responses = [int(n) for n in local["response_lengths"]]
        totals = [int(n) for n in local["total_lengths"]]
        sums = local.get("rollout_mask_sums")
        denominators = [float(s) for s in sums] if sums is not None else [float(m.sum()) for m in masks]
        per_token = bool(getattr(args, "calculate_per_token_loss", False))
        spanned = 0
        for slot, index in enumerate(indices):
            spanned += sum(int(masks[slot][start:end].sum()) for _, start, end in _spans(columns, index))
        return cls(
            columns=local,
            response_lengths=responses,
            total_lengths=totals,
            loss_masks=masks,
            rollout_mask_sums=denominators,
            fillers=[bool(f) for f in local.get(FILLERS, [False] * len(indices))],
            reducer=RolloutMean(masks, denominators, per_token),
            num_spanned=spanned,
        )

    @property
    def mask(self) -> Tensor:
        return self.reducer.mask

    def get(self, name: str) -> list[Tensor] | None:
        """A per-token column as a list of fp32 tensors, or None."""
        values = self.columns.get(name)
        return None if values is None or any(v is None for v in values) else values

    def flat(self, name: str) -> Tensor | None:
        """A per-token column as one tensor `[R]`, or None."""
        values = self.get(name)
        return None if values is None else torch.cat(values)

    def split(self, flat: Tensor) -> list[Tensor]:
        return list(torch.split(flat, self.response_lengths))

    def per_sample(self, flat: Tensor) -> Tensor:
        """Sum a flat `[R]` over each sample: `[samples]`. Masked positions must be zeroed already."""
        owner = torch.repeat_interleave(
            torch.arange(len(self.response_lengths), device=flat.device),
            torch.tensor(self.response_lengths, device=flat.device),
        )
        return flat.new_zeros(len(self.response_lengths)).index_add(0, owner, flat)

    def broadcast(self, values: Tensor) -> Tensor:
        """Repeat a value a sample `[samples]` over its response tokens: `[R]`."""
        return torch.repeat_interleave(values, torch.tensor(self.response_lengths, device=values.device))
