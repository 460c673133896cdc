"""The one interface of both trainers: what a `TrainActor` asks of the FSDP and the Megatron backend.

One instance lives on each trainer rank. Methods marked *collective* must be called by every rank, in the same order.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from miles.backends.training_utils.ragged import pack, unpack

if TYPE_CHECKING:  # the driver uses these types without needing torch
    import torch

# Columns of a batch, by the names of the reference page "train data": `tokens`, `loss_masks`, `rewards`, ...
# Every per-sample column has one entry a sample.
TrainData = dict[str, Any]


@dataclass(frozen=True)
class TrainParallelConfig:
    """The trainer's layout, as far as the batch planner needs it."""

    dp_size: int
    cp_size: int = 1
    vpp_size: int = 1
    microbatch_group_size: int = 1


@dataclass(frozen=True)
class StepPlan:
    """One optimizer step on one data-parallel rank.

    `micro_batches` holds indices into the shard's columns. Every rank has equally many of them (`[]` never occurs).
    `num_rollouts` and `num_tokens` are totals over all ranks: they normalise the loss, so that gradients do not depend
    on the split.
    """

    micro_batches: list[list[int]]
    num_rollouts: int
    num_tokens: int


@dataclass
class TrainShard:
    """One data-parallel rank's part of a rollout batch."""

    rollout_id: int
    columns: TrainData
    steps: list[StepPlan]
    metadata: dict[str, Any] = field(default_factory=dict)

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"columns": pack(self.columns)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state | {"columns": unpack(state["columns"])})


class TrainBackend(ABC):
    """A model, its optimizer, and the policy loss, sharded over the ranks of an initialised process group."""

    args: Any
    parallel: TrainParallelConfig
    dp_rank: int
    device: torch.device

    @abstractmethod
    def load(self) -> int:
        """Build model and optimizer and load them (checkpoint, else Hugging Face directory). Collective.

        Returns: the id of the next rollout, 0 for a fresh run.
        """

    @abstractmethod
    def score(self, shard: TrainShard, tag: str) -> list[torch.Tensor]:
        """Log-probs of every response token under the weights `tag` (`actor`, `ref`, `old_actor`, `teacher`). Collective.

        Returns: one fp32 tensor `[response_length]` on the CPU for each sample of the shard, in order.
        """

    @abstractmethod
    def train(self, shard: TrainShard) -> list[dict[str, float]]:
        """Run the shard's optimizer steps. Collective.

        Returns: metrics, one dictionary an optimizer step, reduced over ranks: the same on every rank. What concerns the
            whole batch (`rollout/`, `perf/`) is in the last.
        """

    @abstractmethod
    def iter_weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Every serving tensor under its Hugging Face name, whole, in the rollout dtype. Collective.

        All ranks must exhaust the iterator; ranks for which `is_weight_source` is false may get empty tensors.
        """

    @property
    @abstractmethod
    def is_weight_source(self) -> bool:
        """Whether this rank holds whole tensors in `iter_weights` and sends them to the engines."""

    @abstractmethod
    def save(self, directory: Path) -> None:
        """Write model, optimizer, schedule and every rank's RNG below `directory`, which exists. Collective."""

    @abstractmethod
    def export_hf(self, directory: Path) -> None:
        """Write a Hugging Face directory that `--hf-checkpoint` accepts. Collective."""

    def sleep(self, *, keep_weights: bool = False) -> None:
        """Give device memory back: all of it, or with `keep_weights` what `iter_weights` does not need.

        The default, for host memory, keeps everything.
        """

    def wake(self) -> None:
        """Undo `sleep`."""
