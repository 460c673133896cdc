"""Public flags that never had an effect: still known, so that a command that gives one is told to drop it."""

from __future__ import annotations

from miles.arguments.flag import flag, group

_UNREAD = "nothing reads it"


@group("Without effect")
class CompatibilityArgs:
    rollout_buffer_url: str | None = flag(None, "Nothing.", dead=_UNREAD)
    fetch_trajectory_retry_times: int = flag(-1, "Nothing.", dead=_UNREAD)
    min_batch_collection_ratio: float = flag(1.0, "Nothing.", dead=_UNREAD)
    rollout_task_type: str = flag("math", "Nothing.", dead=_UNREAD)
    lora_sync_from_tensor: bool = flag(False, "Nothing.", dead=_UNREAD)
    http_proxy: str | None = flag(None, "Nothing.", dead="set the http_proxy environment variable instead")
