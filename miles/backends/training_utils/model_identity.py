"""Whether a checkpoint belongs to the model of `--hf-checkpoint`: by what it recorded, before anything is loaded."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

from miles.backends.training_utils.checkpoint import CheckpointError
from miles.backends.training_utils.model_dir import tensor_shapes

MODEL = "model.json"
# Config fields whose difference explains a difference of tensors.
CONFIG_FIELDS = (
    "model_type", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads",
    "head_dim", "vocab_size", "tie_word_embeddings", "num_experts", "num_experts_per_tok", "moe_intermediate_size",
    "rope_theta", "rms_norm_eps",
)  # fmt: skip
_LISTED = 12


def identity(config: dict[str, Any], shapes: dict[str, list[int]]) -> dict[str, Any]:
    """What must agree for weights to be loadable: tensor names and shapes, and the config that explains them."""
    return {"config": {name: config[name] for name in CONFIG_FIELDS if name in config}, "tensors": shapes}


def recorded(checkpoint: Path) -> dict[str, Any]:
    """The identity that a checkpoint was saved with. Raises: CheckpointError when it has none."""
    file = checkpoint / MODEL
    try:
        return json.loads(file.read_text())
    except (OSError, ValueError) as error:
        raise CheckpointError(
            f"{file} cannot be read: {error}. Was this checkpoint written by another trainer?"
        ) from error


def check_same_model(saved: dict[str, Any], ours: dict[str, Any], checkpoint: Path, hf_checkpoint: Any) -> None:
    """Raise CheckpointError listing how the checkpoint's model differs from the one that was built from `hf_checkpoint`."""
    names = sorted(ours["config"].keys() | saved["config"].keys())
    here, there = ours["tensors"], saved["tensors"]
    differences = _config_differences(saved, ours, names)
    differences += [f"it lacks {name}" for name in sorted(here.keys() - there.keys())]
    differences += [f"it has {name}, which this model lacks" for name in sorted(there.keys() - here.keys())]
    _refuse(differences + _shape_differences(saved, ours), saved, checkpoint, hf_checkpoint)


def check_before_loading(checkpoint: Path, hf_checkpoint: str | Path) -> None:
    """The same from files alone, and so weaker: what config.json or the weight files do not spell out is not compared.

    Raises: CheckpointError.
    """
    saved, directory = recorded(checkpoint), Path(hf_checkpoint)
    try:
        config = json.loads((directory / "config.json").read_text(encoding="utf-8"))
        shapes = tensor_shapes(directory)
    except (OSError, ValueError, struct.error):
        return  # a model directory that cannot be read is no matter of the checkpoint
    ours = identity({k: v for k, v in config.items() if v is not None}, shapes)
    differences = _config_differences(saved, ours, sorted(ours["config"].keys() & saved["config"].keys()))
    _refuse(differences + _shape_differences(saved, ours), saved, checkpoint, hf_checkpoint)


def _config_differences(saved: dict[str, Any], ours: dict[str, Any], names: list[str]) -> list[str]:
    here, there = ours["config"], saved["config"]
    return [
        f"{name} is {here.get(name)} here and {there.get(name)} in the checkpoint"
        for name in names
        if here.get(name) != there.get(name)
    ]


def _shape_differences(saved: dict[str, Any], ours: dict[str, Any]) -> list[str]:
    here, there = ours["tensors"], saved["tensors"]
    return [
        f"{name} has shape {there[name]} instead of {here[name]}"
        for name in sorted(here.keys() & there.keys())
        if here[name] != there[name]
    ]


def _refuse(differences: list[str], saved: dict[str, Any], checkpoint: Path, hf_checkpoint: Any) -> None:
    if not differences:
        return
    more = f"; and {len(differences) - _LISTED} more differences" if len(differences) > _LISTED else ""
    source = f" ({saved['hf_checkpoint']})" if saved.get("hf_checkpoint") else ""
    raise CheckpointError(
        f"--load: {checkpoint} is a checkpoint of another model than --hf-checkpoint {hf_checkpoint}: "
        f"{'; '.join(differences[:_LISTED])}{more}. Set --hf-checkpoint to the model that the checkpoint was trained "
        f"from{source}, or leave --load out, with a --save of its own, to start this model afresh"
    )
