"""The flags that a weight update reads."""

from types import SimpleNamespace
from typing import Any


def update_args(**fields: Any) -> SimpleNamespace:
    """Broadcast on a CPU, every tensor verified; `fields` win."""
    defaults: dict[str, Any] = dict(
        update_weight_transfer_mode="broadcast",
        update_weight_buffer_size=20_000,  # several buckets, so that joined tensors are cut apart
        weight_update_timeout=20.0,
        train_device="cpu",
        colocate=False,
        keep_published_weights=False,
        pause_generation_mode="retract",
        verify_weight_update=True,
        check_weight_update_selector="all",
        check_weight_update_skip_list=None,
    )
    return SimpleNamespace(**defaults | fields)
