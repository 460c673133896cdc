"""The correction under the path that launch commands name: see `miles.backends.training_utils.loss_hub.mis`."""

from miles.backends.training_utils.loss_hub.mis import (
    compute_mis_weights,
    compute_mis_weights_fsdp,
    compute_mis_weights_with_cp,
)

__all__ = ["compute_mis_weights", "compute_mis_weights_fsdp", "compute_mis_weights_with_cp"]
