"""What the trainer must know about a model family: how its config reads, and which tensor is which."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Entry:
    """One row of a name map: a Megatron tensor, the Hugging Face tensors that it is made of, and how.

    Names hold `{layer}` and `{expert}`, counted over the whole model. Megatron names are those of `canonical.py`, equal
    for both layer implementations. `kind` is a key of `transforms.py`.
    """

    megatron: str
    hf: tuple[str, ...]
    kind: str = "whole"


@dataclass(frozen=True)
class Family:
    """A table of names, and a reading of the config.

    `fields`: config -> fields of `TransformerConfig`. `problems`: config -> what it asks for that cannot be built, one
    message each. `unused`: patterns, as in `Entry`, of checkpoint tensors that the model does without.
    """

    name: str
    model_types: tuple[str, ...]
    entries: tuple[Entry, ...]
    fields: Callable[[Any], dict[str, Any]]
    problems: Callable[[Any], list[str]] = field(default=lambda config: [])
    unused: tuple[str, ...] = ()


class UnsupportedModelError(ValueError):
    """A model that the Megatron trainer cannot build; the message says what, and what it can."""
