"""Processes and devices: how many trainer ranks and engines, where they go, what they give back between steps."""

from __future__ import annotations

from miles.arguments.flag import flag, group


@group("Cluster and placement")
class ClusterArgs:
    actor_num_nodes: int = flag(1, "Nodes of the trainer.", ge=1)
    actor_num_gpus_per_node: int = flag(
        8, "Trainer ranks on each node: one GPU a rank, or --actor-cpus-per-rank CPUs where there is no GPU.", ge=1
    )
    actor_cpus_per_rank: int = flag(1, "CPU threads of a trainer rank that has no GPU.", ge=1)
    rollout_num_gpus: int | None = flag(
        None, "GPUs (without GPUs: engine ranks) for all engines together. Colocated runs use the trainer's.", ge=0
    )
    rollout_num_gpus_per_engine: int = flag(1, "GPUs of one engine: its tensor-parallel size.", ge=1)
    num_gpus_per_node: int = flag(
        8, "GPUs on a node, for placing engines that span nodes.", ge=1, owner="sglang", lenient=True
    )
    train_device: str | None = flag(
        None,
        "Where the trainer computes. Unset: cuda if this host has a usable GPU, otherwise cpu.",
        choices=("cpu", "cuda"),
    )
    colocate: bool = flag(False, "Trainer and engines share devices and take turns, instead of having their own.")
    gpus_per_rank: float = flag(
        1.0,
        "GPUs that a trainer or engine rank gets. Below 1, ranks share a GPU: trainer and engine each with its own part of "
        "the memory, and weights through host memory (gloo). For trying a disaggregated run on one card.",
        gt=0,
        le=1,
    )
    distributed_backend: str = flag(
        "nccl",
        "torch.distributed backend of GPU trainers; ranks on CPUs always use gloo.",
        choices=("nccl", "gloo"),
        later={"gloo": "placement"},
    )
    distributed_timeout_minutes: int = flag(10, "Longest wait of one collective of the trainer group.", ge=1)
    cluster_wait_timeout: float = flag(60.0, "Seconds to wait for the Ray cluster to have what the run needs.", gt=0)
    train_env_vars: dict = flag({}, "Environment variables of the trainer processes, as a JSON object.", metavar="JSON")
    pin_rollout_manager_to_head: bool = flag(
        False,
        "Run the rollout manager on the Ray head node (for clusters whose workers come and go).",
        system="placement",
    )


@group("Memory offload", system="offload")
class OffloadArgs:
    offload: bool = flag(False, "Short for --offload-train --offload-rollout.")
    offload_train: bool | None = flag(
        None, "Free the trainer's device memory while engines generate. Unset: on for colocated GPU runs."
    )
    offload_rollout: bool | None = flag(
        None, "Free engine memory while the trainer works. Unset: on for colocated GPU runs."
    )
    offload_rollout_level: list[str] = flag(
        ["kv_cache", "weight"], "What engines release.", choices=("kv_cache", "weight"), owner="offload-rollout"
    )


@group("Memory offload to disk", system="offload-disk")
class OffloadDiskArgs:
    offload_train_target: str = flag(
        "cpu", "Where trainer memory goes.", choices=("cpu", "disk"), owner="offload-train"
    )
    offload_train_disk_dir: str | None = flag(
        None,
        "Folder for offload to disk. Unset: miles_train_offload_<uid> below $SCRATCH or /scratch.",
        owner="offload-disk",
    )
    offload_train_disk_chunk_mb: int = flag(
        256, "Staging chunk of offload to disk, in MiB.", ge=1, owner="offload-disk"
    )
    stream_optimizer_state_to_disk: bool = flag(
        False, "Keep optimizer state on NVMe and stream it through memory bucket by bucket in each step."
    )
    stream_optimizer_state_moment_dtype: str = flag(
        "fp32",
        "Type of the Adam moments on disk; main weights stay fp32.",
        choices=("fp32", "bf16", "fp16", "fp8e4m3", "fp8e5m2"),
    )
    train_memory_margin_bytes: int = flag(
        1 << 30,
        "Device memory the trainer leaves free when it offloads, in bytes.",
        ge=0,
        owner="offload-train",
    )
    rematerialize_param_from_master_weight: bool = flag(
        False, "Keep no copy of the parameters while offloaded; rebuild them from the fp32 master weights."
    )
    check_rematerialize_param_from_master_weight: bool = flag(
        False, "Compare digests of the first rebuilt parameters with the originals."
    )
