"""How the trainer's weights reach the engines, and how that is checked."""

from __future__ import annotations

from miles.arguments.flag import flag, group


@group("Weight update")
class WeightUpdateArgs:
    update_weight_buffer_size: int = flag(512 << 20, "Size of one bucket of weights, in bytes.", ge=1)
    update_weights_interval: int = flag(1, "Update the engines after this many rollouts (train_async.py).", ge=1)
    pause_generation_mode: str = flag(
        "retract",
        "What happens to requests that an update meets: abort ends them, retract computes their cache again, in_place keeps it.",
        choices=("abort", "retract", "in_place"),
    )
    update_weight_transfer_mode: str = flag(
        "broadcast",
        "How weights travel. ipc passes handles of device memory, for engines on the trainer's device: the default of "
        "colocated GPU runs. An import path names a WeightTransport.",
        choices=None,
        metavar="broadcast|ipc|p2p|disk-delta|IMPORT.PATH",
        later={"p2p": "p2p", "disk-delta": "disk-delta"},
    )
    weight_update_timeout: float = flag(300.0, "Seconds that one update may take before it is aborted.", gt=0)
    verify_weight_update: bool = flag(
        True, "Compare a digest of every tensor on every engine with the trainer's, in every update.", negatable=True
    )
    check_weight_update_equal: bool = flag(
        False,
        "Before the first rollout: fill the engines' tensors with noise, update, and compare with the trainer's copy.",
    )
    check_weight_update_selector: str = flag(
        "all", "Models to compare.", choices=("all", "target", "draft"), owner="check-weight-update"
    )
    check_weight_update_skip_list: list[str] | None = flag(
        None, "Substrings of tensor names whose difference is reported but not an error.", owner="check-weight-update"
    )
    check_weight_update_allow_quant_error: bool = flag(
        False,
        "Allow one unit in the last place on quantised tensors.",
        owner="check-weight-update",
        system="megatron-formats",
    )


@group("Weight update by disk or RDMA")
class WeightTransportArgs:
    update_weight_disk_dir: str | None = flag(
        None, "Shared folder for weight files.", metavar="DIR", system="disk-delta", owner="disk-delta"
    )
    update_weight_local_checkpoint_dir: str | None = flag(
        None,
        "Folder on each engine host that deltas are applied to.",
        metavar="DIR",
        system="disk-delta",
        owner="disk-delta",
    )
    update_weight_delta_encoding: str = flag(
        "xor", "How a changed tensor is written.", choices=("xor", "overwrite"), system="disk-delta", owner="disk-delta"
    )
    update_weight_delta_checksum: str = flag(
        "xxh3-128",
        "Digest of the files.",
        choices=("xxh3-128", "blake3", "adler32"),
        system="disk-delta",
        owner="disk-delta",
    )
    custom_update_weight_post_write_path: str | None = flag(
        None,
        "Called with (args, version_dir, rollout_engines) on trainer ranks once files are written.",
        hook="post_write",
        system="disk-delta",
        owner="disk-delta",
    )
    p2p_transfer_num_workers: int = flag(4, "Transfer threads of a trainer rank.", ge=1, system="p2p", owner="p2p")
    p2p_transfer_timeout: float = flag(30.0, "Seconds for one transfer.", gt=0, system="p2p", owner="p2p")
    check_lora_weight_equal: bool = flag(
        False, "Compare digests of LoRA adapters after each colocated update.", system="lora", owner="lora"
    )
