"""Every flag, one module a concern. `GROUPS` fixes their order on the command line's help and the reference page."""

from __future__ import annotations

from miles.arguments.groups.algorithm import AlgorithmArgs, CriticArgs
from miles.arguments.groups.architecture import ArchitectureArgs, LatentAttentionArgs
from miles.arguments.groups.backend import BackendArgs, MegatronBackendArgs
from miles.arguments.groups.cluster import ClusterArgs, OffloadArgs, OffloadDiskArgs
from miles.arguments.groups.compatibility import CompatibilityArgs
from miles.arguments.groups.data import BatchArgs, DataArgs
from miles.arguments.groups.debug import CiArgs, DebugArgs, DumperArgs, ProfileArgs
from miles.arguments.groups.evaluation import EvalArgs, EvalFleetArgs
from miles.arguments.groups.fault_tolerance import FaultToleranceArgs, FtTrainerArgs
from miles.arguments.groups.fsdp import FsdpArgs
from miles.arguments.groups.fully_async import FullyAsyncArgs
from miles.arguments.groups.hooks import HookArgs
from miles.arguments.groups.logging import (
    DashboardArgs,
    LoggingArgs,
    MlflowArgs,
    PrometheusArgs,
    TensorboardArgs,
    WandbArgs,
)
from miles.arguments.groups.lora import LoraArgs, MultiLoraArgs
from miles.arguments.groups.megatron_parallel import MegatronParallelArgs
from miles.arguments.groups.mismatch import MismatchArgs
from miles.arguments.groups.model import ModelArgs
from miles.arguments.groups.moe import MoeArchitectureArgs, MoeArgs
from miles.arguments.groups.opd import OpdArgs
from miles.arguments.groups.optimizer import MegatronOptimizerArgs, OptimizerArgs
from miles.arguments.groups.precision import MegatronPrecisionArgs, PrecisionArgs, RecomputeArgs
from miles.arguments.groups.reward import RewardArgs
from miles.arguments.groups.rollout import EmbeddedEngineArgs, EngineTopologyArgs, MultiTurnArgs, RolloutArgs
from miles.arguments.groups.router_session import RouterArgs, SessionArgs
from miles.arguments.groups.weight_update import WeightTransportArgs, WeightUpdateArgs

GROUPS: tuple[type, ...] = (
    ModelArgs,
    ClusterArgs,
    DataArgs,
    BatchArgs,
    RolloutArgs,
    RewardArgs,
    EvalArgs,
    AlgorithmArgs,
    MismatchArgs,
    OptimizerArgs,
    WeightUpdateArgs,
    BackendArgs,
    PrecisionArgs,
    FsdpArgs,
    EmbeddedEngineArgs,
    RouterArgs,
    LoggingArgs,
    WandbArgs,
    TensorboardArgs,
    DebugArgs,
    HookArgs,
    FaultToleranceArgs,
    CiArgs,
    ArchitectureArgs,
    LatentAttentionArgs,
    MoeArchitectureArgs,
    MegatronBackendArgs,
    MegatronParallelArgs,
    MegatronOptimizerArgs,
    MegatronPrecisionArgs,
    RecomputeArgs,
    MoeArgs,
    OffloadArgs,
    OffloadDiskArgs,
    WeightTransportArgs,
    FullyAsyncArgs,
    MultiTurnArgs,
    SessionArgs,
    EngineTopologyArgs,
    EvalFleetArgs,
    CriticArgs,
    LoraArgs,
    MultiLoraArgs,
    OpdArgs,
    FtTrainerArgs,
    DashboardArgs,
    MlflowArgs,
    PrometheusArgs,
    ProfileArgs,
    DumperArgs,
    CompatibilityArgs,
)
