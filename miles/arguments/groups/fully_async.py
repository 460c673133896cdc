"""Fully asynchronous rollout: engines keep generating while the trainer works."""

from __future__ import annotations

from miles.arguments.flag import flag, group


@group("Fully asynchronous rollout", system="fully-async", owner="fully-async")
class FullyAsyncArgs:
    fully_async: bool = flag(
        False, "Generate without pause (train_async.py); trainer and engines need devices of their own."
    )
    max_weight_staleness: int | None = flag(
        None, "Refuse a group whose oldest token is more than this many weight versions old.", ge=0
    )
    async_max_concurrent_samples: int | None = flag(
        None, "Trajectories in flight, rounded down to whole groups. Unset: --rollout-batch-size groups.", ge=1
    )
    async_data_buffer_capacity_factor: float = flag(
        2.0, "Finished groups that may wait, as a multiple of --rollout-batch-size.", gt=0
    )
    async_unused_samples_handler: str = flag(
        "drop", "What happens to the prompts of aborted and stale groups.", choices=("retry", "drop")
    )
    custom_async_data_buffer_path: str | None = flag(
        None, "Class DataBuffer(DataBufferConstructorInput) that replaces the buffer.", hook="data_buffer"
    )
