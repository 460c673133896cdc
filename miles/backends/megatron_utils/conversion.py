"""Between Hugging Face directories and megatron-core's torch_dist checkpoints, on the host alone.

The layout of the converting ranks is no property of either side: several ranks only share the memory and the work, as
pipeline stages.
"""

from __future__ import annotations

import contextlib
import json
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist

from miles.backends.megatron_utils.checkpoint import read_weights, write_weights
from miles.backends.megatron_utils.layout import initialize
from miles.backends.megatron_utils.model import build_model
from miles.backends.megatron_utils.model_description import describe_model
from miles.backends.megatron_utils.platform import choose_platform
from miles.backends.megatron_utils.weights.checkpoint_files import HFDirectory
from miles.backends.megatron_utils.weights.exporting import WeightExporter
from miles.backends.megatron_utils.weights.loading import load_weights
from miles.backends.megatron_utils.weights.plan import plan_weights
from miles.backends.training_utils.checkpoint import CheckpointStore
from miles.backends.training_utils.model_identity import MODEL, check_same_model, identity, recorded


@contextlib.contextmanager
def conversion_ranks() -> Iterator[None]:
    """The process group of a conversion: torchrun's ranks, or this process alone. Leaves GPUs alone."""
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
        try:
            yield
        finally:
            dist.destroy_process_group()
        return
    with tempfile.TemporaryDirectory() as folder:
        dist.init_process_group("gloo", store=dist.FileStore(f"{folder}/store", 1), rank=0, world_size=1)
        try:
            yield
        finally:
            dist.destroy_process_group()


class _Model:
    """The model of a Hugging Face directory, with weights that are not loaded yet. Collective.

    Args:
        dtype: of its parameters; None for the dtype that most of the directory's bytes have.
    """

    def __init__(self, directory: Path, dtype: torch.dtype | None, *, trust_remote_code: bool) -> None:
        args = SimpleNamespace(
            hf_checkpoint=str(directory),
            pipeline_model_parallel_size=dist.get_world_size(),
            trust_remote_code=trust_remote_code,
        )
        platform = choose_platform("cpu")
        initialize(args, platform)
        self.files = HFDirectory(directory)
        self.description = describe_model(args, directory, platform, dtype or _usual_dtype(self.files))
        self.chunks = build_model(args, self.description, platform)
        self.plan = plan_weights(self.chunks, self.description, self.files)

    def identity(self) -> dict[str, Any]:
        """As checkpoints of the trainer record it."""
        shapes = {name: list(stored.shape) for name, stored in self.files.tensors.items()}
        return identity(self.description.hf_config.to_dict(), shapes)


def to_torch_dist(directory: Path, save: Path, *, trust_remote_code: bool = False) -> Path:
    """Write the weights of `directory` as checkpoint 0 of `save`, for `--load SAVE --finetune`. Collective.

    Returns: its folder.
    Raises: UnsupportedModelError, NameMapError, CheckpointError.
    """
    model = _Model(directory, None, trust_remote_code=trust_remote_code)
    load_weights(model.plan, model.files)
    store = CheckpointStore(save)
    folder = [store.begin(0)] if dist.get_rank() == 0 else [None]
    dist.broadcast_object_list(folder)
    assert folder[0] is not None
    write_weights(model.chunks, folder[0])
    if dist.get_rank() == 0:
        known = model.identity() | {"trainer": "megatron", "optimizer": "left out", "hf_checkpoint": str(directory)}
        (folder[0] / MODEL).write_text(json.dumps(known, indent=2))
        store.commit(0)
    dist.barrier()
    return store.path(0)


def to_hf(checkpoint: Path, origin: Path, target: Path, *, trust_remote_code: bool = False) -> None:
    """Write the weights of a checkpoint folder as a Hugging Face directory like `origin`. Collective.

    Dtypes, config and tokenizer are `origin`'s. Raises: CheckpointError for a checkpoint of another model.
    """
    # fp32 holds every value that the checkpoint may have.
    model = _Model(origin, torch.float32, trust_remote_code=trust_remote_code)
    check_same_model(recorded(checkpoint), model.identity(), checkpoint, origin)
    read_weights(model.chunks, checkpoint)
    WeightExporter(model.plan).write_directory(target)


def _usual_dtype(files: HFDirectory) -> torch.dtype:
    sizes: dict[torch.dtype, int] = {}
    for stored in files.tensors.values():
        sizes[stored.dtype] = sizes.get(stored.dtype, 0) + torch.Size(stored.shape).numel()
    return max(sizes, key=lambda dtype: sizes[dtype])
