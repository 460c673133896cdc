"""The systems that flags belong to, and which of them this version has.

A flag (or one value of it) that names a system that does not work yet is declared, documented and parsed, and refused at
startup when it asks for something. Building a system ends with one line here.
"""

from __future__ import annotations

SYSTEMS: dict[str, tuple[str, bool]] = {
    # name: (what messages call it, whether it works)
    "sglang": ("the SGLang engine", True),
    "sglang-router": ("SGLang's router", False),
    "placement": ("the choice of nodes and collectives", False),
    "engine-topology": ("the engine topology (external engines, prefill/decode split, per-model groups)", True),
    "megatron": ("the Megatron trainer", True),
    "megatron-formats": ("FP8, FP4 and other number formats of Transformer Engine", False),
    "megatron-offload": ("the Megatron optimizer on the host", False),
    "megatron-tuning": ("parts of the Megatron trainer that only tune it", False),
    "megatron-bridge": ("conversion by megatron-bridge", False),
    "sparse-attention": ("sparse and linear attention", False),
    "muon": ("the Muon optimizer", False),
    "critic": ("PPO with a critic", True),
    "fully-async": ("fully asynchronous rollout", False),
    "sessions": ("TITO sessions and agents", True),
    "miles-router": ("the router process", True),
    "distributed-post": ("requests that several nodes send", False),
    "multi-turn": ("the multi-turn tool-calling generate function", True),
    "replay": ("routing and indexer replay (R3)", False),
    "true-on-policy": ("true-on-policy profiles", False),
    "opd": ("on-policy distillation", False),
    "lora": ("LoRA", False),
    "multi-lora": ("multi-LoRA", False),
    "p2p": ("the p2p weight transport", False),
    "disk-delta": ("the disk-delta weight transport", False),
    "offload": ("memory offload between the steps of a colocated run", True),
    "offload-disk": ("offload to disk, and parameters rebuilt from their master copies", False),
    "eval-fleet": ("evaluation on engines of its own", False),
    "dashboard": ("the dashboard", False),
    "mlflow": ("the MLflow sink", False),
    "prometheus": ("the Prometheus sink", False),
    "ft-trainer": ("the fault-tolerant trainer", False),
    "dumper": ("the tensor dumper", False),
    "recorded-checks": ("comparisons with recorded runs", False),
    "profiling": ("profiles and memory snapshots of the trainer", False),
    "mooncake-store": ("the Mooncake object store", False),
    "multimodal": ("multimodal prompts", False),
    "async-save": ("checkpoints written in the background", False),
    "mtp": ("training of multi-token-prediction layers", False),
}


def works(system: str | None) -> bool:
    return system is None or SYSTEMS[system][1]


def title(system: str) -> str:
    return SYSTEMS[system][0]


def missing(system: str, *subjects: str) -> str:
    """The one message for everything that waits for a system."""
    verb, drop = ("belongs", "it") if len(subjects) == 1 else ("belong", "them")
    return f"{', '.join(subjects)} {verb} to {title(system)}, which this version does not have yet: drop {drop}"
