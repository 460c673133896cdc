"""Where prompts come from: an endless, seeded, resumable stream of groups, with a buffer of groups to generate again."""

from __future__ import annotations

import copy
import io
import logging
import random
from abc import ABC, abstractmethod
from pathlib import Path
from typing import Any

import torch
import xxhash

from miles.rollout.dataset import DatasetKeys, PromptRow, load_prompt_rows
from miles.rollout.prompts import load_tokenizer
from miles.utils.atomic_io import write_atomic
from miles.utils.imports import load_function
from miles.utils.types import Group, Sample

logger = logging.getLogger(__name__)

_STATE_VERSION = 1


class DataSourceStateError(RuntimeError):
    """Saved data-source state that is missing, damaged, or of another data set."""


class DataSource(ABC):
    """What `--data-source-path` names: a class built from `args`."""

    @abstractmethod
    def get_samples(self, num_samples: int) -> list[Group]:
        """`num_samples` groups of `--n-samples-per-prompt` samples, each with `index` and `group_index` set."""

    @abstractmethod
    def add_samples(self, samples: list[Group]) -> None:
        """Take groups back: they are handed out again before new prompts."""

    @abstractmethod
    def save(self, rollout_id: int) -> None:
        """Write the state after rollout `rollout_id` below `--save`."""

    @abstractmethod
    def load(self, rollout_id: int | None = None) -> None:
        """Continue after rollout `rollout_id`, from below `--load`."""

    def get_buffer_length(self) -> int:
        """Groups waiting to be handed out again."""
        return 0

    def close(self) -> None:
        """Release what the source holds. Called once, at the end of the run."""


def state_path(root: str | Path, rollout_id: int) -> Path:
    return Path(root) / "rollout" / f"global_dataset_state_dict_{rollout_id}.pt"


class RolloutDataSource(DataSource):
    """Prompts of `--prompt-data`, epoch after epoch, shuffled by `--rollout-seed` + epoch with `--rollout-shuffle`.

    `get_samples` may span any number of epochs: a data set smaller than a batch is simply walked several times.
    With `--disable-rollout-global-dataset` the groups are empty samples, for rollout functions that bring their prompts.
    """

    def __init__(self, args: Any) -> None:
        self.args = args
        self.epoch_id = 0
        self.sample_offset = 0  # rows of the current epoch that were handed out
        self.sample_group_index = 0
        self.sample_index = 0
        self.metadata: dict[str, Any] = {}
        self.rows: list[PromptRow] | None = None
        self._fingerprint: str | None = None
        if getattr(args, "rollout_global_dataset", True):
            self._load_rows()

    def _load_rows(self) -> None:
        args = self.args
        if not getattr(args, "prompt_data", None):
            raise ValueError("--prompt-data is not set: give a file, or pass --disable-rollout-global-dataset")
        if getattr(args, "multimodal_keys", None):
            raise ValueError("--multimodal-keys: image, video and audio prompts are not supported; drop the flag")
        keys, limit = DatasetKeys.of_run(args), getattr(args, "rollout_max_prompt_len", None)
        self.rows, dropped = load_prompt_rows(args, args.prompt_data, keys, load_tokenizer(args), max_prompt_len=limit)
        self.num_overlong_prompts = dropped
        if dropped:
            logger.warning(
                "%d of %d prompts are longer than %s tokens and were left out", dropped, len(self) + dropped, limit
            )
        self._order = self._epoch_order()

    def __len__(self) -> int:
        """Prompts in one epoch."""
        return len(self.rows) if self.rows is not None else 0

    def _epoch_order(self) -> list[int]:
        order = list(range(len(self)))
        if getattr(self.args, "rollout_shuffle", False):
            random.Random(self.args.rollout_seed + self.epoch_id).shuffle(order)
        return order

    def _next_row(self) -> PromptRow | None:
        if self.rows is None:
            return None
        if self.sample_offset == len(self.rows):
            self.epoch_id += 1
            self.sample_offset = 0
            self._order = self._epoch_order()
        row = self.rows[self._order[self.sample_offset]]
        self.sample_offset += 1
        return row

    def _new_group(self) -> Group:
        row = self._next_row()
        group = []
        for _ in range(self.args.n_samples_per_prompt):
            sample = Sample(group_index=self.sample_group_index, index=self.sample_index)
            if row is not None:
                sample.prompt, sample.label = copy.deepcopy(row.prompt), row.label
                sample.metadata = copy.deepcopy(row.metadata)
            self.sample_index += 1
            group.append(sample)
        self.sample_group_index += 1
        return group

    def get_samples(self, num_samples: int) -> list[Group]:
        return [self._new_group() for _ in range(num_samples)]

    def add_samples(self, samples: list[Group]) -> None:
        raise RuntimeError(
            f"{type(self).__name__} takes no groups back; "
            "--partial-rollout needs --data-source-path miles.rollout.data_source.RolloutDataSourceWithBuffer"
        )

    # ---- state ---------------------------------------------------------------------------------------------------

    def fingerprint(self) -> str:
        """Digest of prompts, labels and order: a saved position means nothing in another data set."""
        if self._fingerprint is not None:
            return self._fingerprint
        state = xxhash.xxh3_128()
        for row in self.rows or []:
            state.update(repr((row.prompt, row.label)).encode())
        shuffled = getattr(self.args, "rollout_shuffle", False)
        state.update(f"{len(self)}/{self.args.rollout_seed if shuffled else None}".encode())
        self._fingerprint = state.hexdigest()
        return self._fingerprint

    def state_dict(self) -> dict[str, Any]:
        return {
            "state_version": _STATE_VERSION,
            "sample_offset": self.sample_offset,
            "epoch_id": self.epoch_id,
            "sample_group_index": self.sample_group_index,
            "sample_index": self.sample_index,
            "metadata": self.metadata,
            "fingerprint": self.fingerprint(),
            "n_samples_per_prompt": self.args.n_samples_per_prompt,
        }

    def load_state_dict(self, state: dict[str, Any], *, source: str = "state") -> None:
        """Raises: DataSourceStateError when the state belongs to other data."""
        missing = set(self.state_dict()) - set(state)
        if missing:
            raise DataSourceStateError(f"{source} is no data-source state: it lacks {', '.join(sorted(missing))}")
        if state["fingerprint"] != self.fingerprint():
            raise DataSourceStateError(
                f"{source} was saved for other prompts than --prompt-data {getattr(self.args, 'prompt_data', None)} gives now "
                "(rows, labels, chat template, length filter, --rollout-seed and --rollout-shuffle count). "
                "Restore them, or pass --start-rollout-id 0 to start over from the first prompt."
            )
        self.sample_offset, self.epoch_id = state["sample_offset"], state["epoch_id"]
        self.sample_group_index, self.sample_index = state["sample_group_index"], state["sample_index"]
        self.metadata = state["metadata"]
        if self.rows is not None:
            self._order = self._epoch_order()

    def save(self, rollout_id: int) -> None:
        self.save_state(rollout_id, self.state_dict())

    def save_state(self, rollout_id: int, state: dict[str, Any]) -> None:
        """Write a state that `state_dict` gave earlier: the file is there whole or not at all."""
        if getattr(self.args, "save", None) is None:
            raise ValueError("the data source has nowhere to save to: set --save")
        buffer = io.BytesIO()
        torch.save(state, buffer)
        write_atomic(state_path(self.args.save, rollout_id), buffer.getvalue())

    def load(self, rollout_id: int | None = None) -> None:
        """Does nothing for a run that starts at rollout 0 (`rollout_id` None or -1) or without `--load`."""
        root = getattr(self.args, "load", None)
        if root is None or rollout_id is None or rollout_id < 0:
            return
        candidates = [state_path(root, rollout_id), state_path(Path(root) / f"iter_{rollout_id:07d}", rollout_id)]
        path = next((p for p in candidates if p.is_file()), None)
        if path is None:
            raise DataSourceStateError(
                f"--load {root} continues after rollout {rollout_id}, but the data source's state is missing: "
                f"neither {candidates[0]} nor {candidates[1]} exists. Restore it, or pass --start-rollout-id 0."
            )
        try:
            # Own checkpoint: samples with arrays and free metadata, so the full unpickler is needed.
            state = torch.load(path, map_location="cpu", weights_only=False)
        except Exception as error:
            raise DataSourceStateError(f"{path} cannot be read: {type(error).__name__}: {error}") from error
        if not isinstance(state, dict):
            raise DataSourceStateError(f"{path} holds a {type(state).__name__}, not a data-source state")
        self.load_state_dict(state, source=str(path))


def pop_first(args: Any, rollout_id: int | None, buffer: list[Group], num_samples: int) -> list[Group]:
    """The default `--buffer-filter-path`: the oldest groups first."""
    taken = buffer[:num_samples]
    del buffer[: len(taken)]
    return taken


class RolloutDataSourceWithBuffer(RolloutDataSource):
    """The default source: groups that were given back come first, then new prompts. The buffer is part of the state."""

    def __init__(self, args: Any) -> None:
        super().__init__(args)
        self.buffer: list[Group] = []
        self.buffer_filter = load_function(getattr(args, "buffer_filter_path", None)) or pop_first

    def get_samples(self, num_samples: int) -> list[Group]:
        recycled = self._from_buffer(num_samples)
        return recycled + super().get_samples(num_samples - len(recycled))

    def _from_buffer(self, num_samples: int) -> list[Group]:
        if not self.buffer or num_samples == 0:
            return []
        before = len(self.buffer)
        groups = self.buffer_filter(self.args, None, self.buffer, num_samples)
        if len(groups) > num_samples or before - len(self.buffer) < len(groups):
            raise ValueError(
                f"--buffer-filter-path {getattr(self.args, 'buffer_filter_path', None)} returned {len(groups)} groups for "
                f"{num_samples} and took {before - len(self.buffer)} out of the buffer: it must remove what it returns"
            )
        return groups

    def add_samples(self, samples: list[Group]) -> None:
        n = self.args.n_samples_per_prompt
        for group in samples:
            if len(group) != n or not all(isinstance(sample, Sample) for sample in group):
                raise ValueError(f"a group given back must hold {n} samples (--n-samples-per-prompt), got {len(group)}")
        self.buffer.extend(samples)

    def get_buffer_length(self) -> int:
        return len(self.buffer)

    def state_dict(self) -> dict[str, Any]:
        return super().state_dict() | {"buffer": [[sample.to_dict() for sample in group] for group in self.buffer]}

    def load_state_dict(self, state: dict[str, Any], *, source: str = "state") -> None:
        super().load_state_dict(state, source=source)
        n = self.args.n_samples_per_prompt
        if state["buffer"] and state["n_samples_per_prompt"] != n:
            raise DataSourceStateError(
                f"{source} holds {len(state['buffer'])} unfinished groups of {state['n_samples_per_prompt']} samples; "
                f"--n-samples-per-prompt is {n} now. Resume with the old value, or pass --start-rollout-id 0."
            )
        self.buffer = [[Sample.from_dict(sample) for sample in group] for group in state["buffer"]]
