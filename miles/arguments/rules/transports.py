"""Weight transports, and the checks of an update."""

from __future__ import annotations

import os

from miles.arguments.args import Args
from miles.arguments.rules.conflict import Clash, excludes, requires
from miles.arguments.rules.rule import Rule, about

COLOCATED = Clash("--colocate", lambda a: a.colocate)
LORA = Clash("--lora-rank", lambda a: a.lora_rank > 0)
SPLIT_PREFILL = Clash("--prefill-num-servers", lambda a: a.prefill_num_servers is not None)


def _p2p(a: Args) -> bool:
    return a.update_weight_transfer_mode == "p2p"


def _disk(a: Args) -> bool:
    return a.update_weight_transfer_mode == "disk-delta"


P2P = about(
    "p2p",
    excludes(
        "p2p-alone",
        "--update-weight-transfer-mode p2p",
        _p2p,
        COLOCATED,
        SPLIT_PREFILL,
        LORA,
        Clash("--sglang-pp-size", lambda a: (a.sglang_pp_size or 1) != 1),
        Clash("--megatron-to-hf-mode bridge", lambda a: a.megatron_to_hf_mode == "bridge"),
        Clash("--pause-generation-mode in_place", lambda a: a.pause_generation_mode == "in_place"),
    ),
)

DISK_DELTA = about(
    "disk-delta",
    excludes("disk-delta-alone", "--update-weight-transfer-mode disk-delta", _disk, COLOCATED, SPLIT_PREFILL, LORA),
    requires(
        "disk-delta-folders",
        "--update-weight-transfer-mode disk-delta",
        _disk,
        Clash("--update-weight-disk-dir", lambda a: a.update_weight_disk_dir),
        Clash("--update-weight-local-checkpoint-dir", lambda a: a.update_weight_local_checkpoint_dir),
        Clash(
            "--hf-checkpoint that is a local directory", lambda a: a.hf_checkpoint and os.path.isdir(a.hf_checkpoint)
        ),
    ),
)


def _whole_on_each_device(a: Args) -> bool:
    one_rank = a.actor_num_nodes * a.actor_num_gpus_per_node == 1
    return a.rollout_num_gpus_per_engine == 1 and (one_rank or a.train_backend == "fsdp")


IPC = Rule(
    "ipc-own-device",
    lambda a: a.update_weight_transfer_mode == "ipc" and not (a.colocate and _whole_on_each_device(a)),
    "--update-weight-transfer-mode ipc passes handles of a rank's device memory to the engine on the same device: it needs --colocate, "
    "--rollout-num-gpus-per-engine 1, and ranks that hold the whole model (--train-backend fsdp, or one rank); drop it otherwise "
    "(weights then pass through host memory)",
)

RULES = (
    IPC,
    *P2P,
    *DISK_DELTA,
    Rule(
        "check-needs-updates",
        lambda a: (
            a.check_weight_update_equal and (a.debug_rollout_only or a.debug_train_only or a.debug_skip_weight_update)
        ),
        "--check-weight-update-equal compares engines with the trainer after an update, and this run makes none (--debug-rollout-only, "
        "--debug-train-only, --load-debug-rollout-data or --debug-skip-weight-update): drop one of them",
    ),
)
