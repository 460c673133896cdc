"""Which engines a run has: how many, of how many devices each, for which model, with which options of their own.

Three ways to say it: sizes alone (all engines alike), `--sglang-config` (a YAML of models and groups of engines), or
`--rollout-external` (servers that run already).

    sglang:
      - name: actor                  # any name; exactly one model is trained
        model_path: null             # --hf-checkpoint unless given
        update_weights: true         # unless given: whether model_path is --hf-checkpoint
        num_gpus_per_engine: 2       # for groups that do not say; --rollout-num-gpus-per-engine unless given
        server_groups:               # or engine_groups
          - {worker_type: regular, num_gpus: 4, num_gpus_per_engine: 2, overrides: {mem_fraction_static: 0.8}}

`worker_type`: regular, prefill and decode (one model has both, or neither), or placeholder (devices left free).
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import yaml

REGULAR, PREFILL, DECODE, PLACEHOLDER = "regular", "prefill", "decode", "placeholder"
_KINDS = (REGULAR, PREFILL, DECODE, PLACEHOLDER)
_MODEL_KEYS = {"name", "model_path", "update_weights", "num_gpus_per_engine", "server_groups", "engine_groups"}
_GROUP_KEYS = {"worker_type", "num_gpus", "num_gpus_per_engine", "overrides"}
# What the run or the size of an engine decides.
_NOT_OVERRIDABLE = frozenset(
    [
        *("model_path", "host", "port", "admin_api_key", "api_key", "weight_version", "random_seed"),
        *("nnodes", "node_rank", "dist_init_addr", "nccl_port", "disaggregation_mode", "disaggregation_bootstrap_port"),
    ]
)


class TopologyError(ValueError):
    """Engines that cannot be. `problems` has every reason."""

    def __init__(self, problems: list[str]) -> None:
        super().__init__("; ".join(problems))
        self.problems = problems


@dataclass(frozen=True)
class EngineSpec:
    """One engine. `offset`: its first device among the rollout's, which follow one another; `nodes`: that it spans.

    `address` is that of a server which runs already: it has no devices of ours, and nobody here may end it.
    """

    index: int
    devices: int
    offset: int = 0
    kind: str = REGULAR
    model: str = "actor"
    model_path: str | None = None
    trained: bool = True
    overrides: dict[str, Any] = field(default_factory=dict)
    nodes: int = 1
    address: str | None = None

    @property
    def devices_per_node(self) -> int:
        return self.devices // self.nodes

    def __str__(self) -> str:
        parts = [f"{self.devices} device{'s' if self.devices > 1 else ''}"] if self.address is None else [self.address]
        parts += [f"on {self.nodes} nodes"] if self.nodes > 1 else []
        parts += [self.kind] if self.kind != REGULAR else []
        parts += [f"model {self.model}" + ("" if self.trained else ", not updated")] if self.model != "actor" else []
        return ", ".join(parts)


def plan_engines(args: Any) -> list[EngineSpec]:
    """The engines of a run. Raises TopologyError."""
    if args.debug_train_only:
        return []
    if args.rollout_external:
        return [EngineSpec(i, 0, address=url_of(a)) for i, a in enumerate(args.rollout_external_engine_addrs or ())]
    if args.sglang_config is not None:
        specs, _ = _from_yaml(args)
    else:
        specs = _alike(args)
    problems = [*_sizes(args, specs), *_kinds(specs)]
    if problems:
        raise TopologyError(problems)
    return specs


def devices_of(args: Any) -> int:
    """Devices that the engines of `--sglang-config` take together, placeholders included. Raises TopologyError."""
    return _from_yaml(args)[1]


def engine_args(args: Any, spec: EngineSpec) -> Any:
    """The run's arguments as this engine's launcher should see them: its overrides stand where the flags do."""
    if spec.address is not None:
        return args
    own = copy.copy(args)
    own.rollout_num_gpus_per_engine = spec.devices
    own.hf_checkpoint = spec.model_path or args.hf_checkpoint
    for name, value in spec.overrides.items():
        setattr(own, f"sglang_{name}", value)
    if spec.kind != REGULAR:
        own.sglang_disaggregation_mode = spec.kind
    return own


def url_of(address: str) -> str:
    return (address if "://" in address else f"http://{address}").rstrip("/")


# ---- engines that are all alike ----------------------------------------------------------------------------------------


def _alike(args: Any) -> list[EngineSpec]:
    devices = args.rollout_num_gpus_per_engine
    count = (args.rollout_num_gpus or 0) // devices
    prefill = args.prefill_num_servers or 0
    specs = []
    for index in range(count):
        kind = REGULAR if not prefill else PREFILL if index < prefill else DECODE
        specs.append(EngineSpec(index, devices, index * devices, kind, nodes=_nodes(args, devices)))
    return specs


def _nodes(args: Any, devices: int) -> int:
    return max(devices // args.num_gpus_per_node, 1)


# ---- the YAML ----------------------------------------------------------------------------------------------------------


def _from_yaml(args: Any) -> tuple[list[EngineSpec], int]:
    where = f"--sglang-config {args.sglang_config}"
    try:
        content = yaml.safe_load(Path(args.sglang_config).read_text())
    except (OSError, yaml.YAMLError) as error:
        raise TopologyError([f"{where}: {error}"]) from None
    models = content.get("sglang") if isinstance(content, dict) else None
    if not isinstance(models, list) or not models:
        raise TopologyError([f"{where}: its one key is `sglang`, a list of models"])
    specs: list[EngineSpec] = []
    problems: list[str] = []
    offset = 0
    for number, model in enumerate(models):
        at = f"{where}: model {number}"
        for spec, devices in _model(args, model, at, problems):
            if spec is not None:
                specs.append(replace(spec, index=len(specs), offset=offset))
            offset += devices
    names = [m.get("name", "actor") for m in models if isinstance(m, dict)]
    problems += [f"{where}: two models are named {n}" for n in dict.fromkeys(names) if names.count(n) > 1]
    if not problems and len({s.model for s in specs if s.trained}) != 1:
        problems.append(
            f"{where}: exactly one model is trained, and here {len({s.model for s in specs if s.trained})} are: set "
            "update_weights: true for it and false for the others"
        )
    if problems:
        raise TopologyError(problems)
    return specs, offset


def _model(args: Any, model: Any, at: str, problems: list[str]) -> Iterator[tuple[EngineSpec | None, int]]:
    """The model's engines, each with its devices; None for devices that stay free."""
    if not isinstance(model, dict):
        problems.append(f"{at}: {model!r} is no mapping")
        return
    if unknown := sorted(map(str, set(model) - _MODEL_KEYS)):
        problems.append(f"{at}: {', '.join(unknown)} is not known; there is {', '.join(sorted(_MODEL_KEYS))}")
        return
    name = model.get("name", "actor")
    if name == "eval":
        problems.append(f"{at}: evaluation has no engines of its own in this version: drop the model eval")
    path = model.get("model_path")
    trained = model.get("update_weights", path in (None, args.hf_checkpoint))
    groups = model.get("server_groups", model.get("engine_groups"))
    if not isinstance(groups, list) or not groups:
        problems.append(f"{at} ({name}): server_groups is a list of groups, each with worker_type and num_gpus")
        return
    default = model.get("num_gpus_per_engine") or args.rollout_num_gpus_per_engine
    for number, group in enumerate(groups):
        found = _group_problems(group, default)
        problems += [f"{at} ({name}), group {number}: {text}" for text in found]
        if found:
            continue
        kind, devices = group.get("worker_type", REGULAR), group["num_gpus"]
        if kind == PLACEHOLDER:
            yield None, devices
            continue
        each = group.get("num_gpus_per_engine") or default
        spec = EngineSpec(0, each, 0, kind, name, path, bool(trained), group.get("overrides") or {}, _nodes(args, each))
        for _ in range(devices // each):
            yield spec, each


def _group_problems(group: Any, default: int) -> list[str]:
    if not isinstance(group, dict):
        return [f"{group!r} is no mapping"]
    problems = []
    if unknown := sorted(map(str, set(group) - _GROUP_KEYS)):
        problems.append(f"{', '.join(unknown)} is not known; there is {', '.join(sorted(_GROUP_KEYS))}")
    if group.get("worker_type", REGULAR) not in _KINDS:
        problems.append(f"worker_type {group['worker_type']}: one of {', '.join(_KINDS)}")
    devices, each = group.get("num_gpus"), group.get("num_gpus_per_engine") or default
    if not isinstance(devices, int) or devices < 1:
        problems.append(f"num_gpus {devices}: a number above 0")
    elif not isinstance(each, int) or each < 1 or devices % each:
        problems.append(f"num_gpus {devices} is not a multiple of num_gpus_per_engine {each}")
    overrides = group.get("overrides") or {}
    if not isinstance(overrides, dict):
        problems.append("overrides is a mapping of fields of ServerArgs to values")
    elif taken := sorted(_NOT_OVERRIDABLE & set(overrides)):
        problems.append(f"overrides: {', '.join(taken)} is set for each engine by the run")
    return problems


# ---- what does not fit -------------------------------------------------------------------------------------------------


def _sizes(args: Any, specs: list[EngineSpec]) -> Iterator[str]:
    if args.sglang_config is not None:
        total = devices_of(args)
        if args.rollout_num_gpus not in (None, total):
            yield f"--sglang-config {args.sglang_config} has groups of {total} devices, --rollout-num-gpus says {args.rollout_num_gpus}"
    for devices in dict.fromkeys(s.devices for s in specs if s.devices > args.num_gpus_per_node):
        if devices % args.num_gpus_per_node:
            yield (
                f"an engine of {devices} devices does not fill whole nodes of --num-gpus-per-node {args.num_gpus_per_node}"
            )


def _kinds(specs: list[EngineSpec]) -> Iterator[str]:
    for model in dict.fromkeys(s.model for s in specs):
        kinds = {s.kind for s in specs if s.model == model}
        if kinds & {PREFILL, DECODE} and kinds != {PREFILL, DECODE}:
            yield (
                f"model {model} has {' and '.join(sorted(kinds))} engines: prefill/decode disaggregation needs prefill and "
                "decode engines, and no regular ones (--prefill-num-servers below the number of engines)"
            )
