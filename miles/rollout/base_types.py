"""Typed inputs and outputs of the three rollout layers: rollout, generation, evaluation.

Users replace a layer by import path; these are the signatures that they implement.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from miles.utils.types import Sample

if TYPE_CHECKING:
    from miles.rollout.data_source import DataSource
    from miles.rollout.generate_state import GenerateState


@dataclass(frozen=True)
class RolloutFnConstructorInput:
    """What a rollout class is built from. `engines` is the run's `EnginePool`."""

    args: Any
    data_source: DataSource
    engines: Any = None


@dataclass(frozen=True)
class RolloutFnTrainInput:
    rollout_id: int
    weight_version: int | None = None
    evaluation: bool = field(default=False, init=False)


@dataclass(frozen=True)
class RolloutFnEvalInput:
    rollout_id: int
    generate_state: GenerateState | None = None
    weight_version: str | None = None
    hf_dir: str | None = None
    evaluation: bool = field(default=True, init=False)


RolloutFnInput = RolloutFnTrainInput | RolloutFnEvalInput


@dataclass
class RolloutFnTrainOutput:
    """Groups of samples, `[groups][samples]` (or `[groups][executions][samples]` where one execution yields several)."""

    samples: list[list[Sample]] | list[list[list[Sample]]]
    metrics: dict[str, float] | None = None


@dataclass
class RolloutFnEvalOutput:
    """`{dataset: {"rewards": [...], "truncated": [...], "samples": [...]}}`; a reward that failed is None."""

    data: dict[str, dict[str, list]]
    metrics: dict[str, float] | None = None


@dataclass(frozen=True)
class GenerateFnInput:
    state: GenerateState
    sample: Sample
    sampling_params: dict[str, Any]
    evaluation: bool = False

    @property
    def args(self) -> Any:
        return self.state.args


@dataclass(frozen=True)
class GenerateFnOutput:
    samples: Sample | list[Sample]
