"""Weight matrices in the layout that the machine multiplies fastest, readable and writable as plain tensors.

On a CPU in fp32 a large matrix is kept only in oneDNN's blocked layout, in which small batches run up to twice as fast.
Small matrices stay plain, since a call there costs more than it saves, and so does everything elsewhere. Either way one
output row is bit for bit the same whatever the number of rows (a multiple of ROW_STEP) or threads, which is what makes
a request independent of its company in the batch.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

_PACKED_FROM = 1 << 18  # elements

# Every product has a multiple of this many rows. With fewer, libraries switch to kernels that round differently; and
# elements that do not fill the vectors of an AVX-512 loop (32 elements of fp32: 8 rows of any width divisible by 4) go
# through scalar code, whose exp rounds differently.
ROW_STEP = 8


def can_pack(device: torch.device, dtype: torch.dtype) -> bool:
    return device.type == "cpu" and dtype == torch.float32 and torch.backends.mkldnn.is_available()


class Linear:
    """`y = x W^T + b` with W [out, in]; after `write` it must be `seal`ed before the next product."""

    def __init__(self, out_features: int, in_features: int, *, bias: bool, device: torch.device, dtype: torch.dtype):
        self.shape = (out_features, in_features)
        self.device, self.dtype = device, dtype
        self.bias = torch.zeros(out_features, device=device, dtype=dtype) if bias else None
        self._packs = out_features * in_features >= _PACKED_FROM and can_pack(device, dtype)
        self._plain: torch.Tensor | None = None
        self._packed: torch.Tensor | None = None

    # ---- storage -------------------------------------------------------------------------------------------------

    def plain(self) -> torch.Tensor:
        """W as a plain [out, in] tensor: a copy when it is packed."""
        if self._plain is not None:
            return self._plain
        if self._packed is not None:
            return self._packed.to_dense()
        return self._allocate()

    def _allocate(self) -> torch.Tensor:
        self._plain = torch.zeros(self.shape, device=self.device, dtype=self.dtype)
        return self._plain

    def write(self, rows: slice, value: torch.Tensor) -> None:
        if self._plain is None:
            whole = rows.stop - rows.start == self.shape[0]
            self._plain = torch.empty(self.shape, device=self.device, dtype=self.dtype) if whole else self.plain()
            self._packed = None
        self._plain[rows].copy_(value)

    def seal(self) -> None:
        """Move the plain matrix into the packed layout, where this machine has one."""
        if self._packs and self._plain is not None:
            self._packed = torch.ops.mkldnn._reorder_linear_weight(self._plain, 64)
            self._plain = None

    def free(self) -> None:
        self._plain = self._packed = None

    # ---- products ------------------------------------------------------------------------------------------------

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x [rows, in], contiguous -> [rows, out]."""
        if self._packed is not None:
            return torch.ops.mkldnn._linear_pointwise(x, self._packed, self.bias, "none", [], "")
        return self._multiply(x)

    def add_to(self, residual: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """residual + product."""
        if self._packed is not None:
            return torch.ops.mkldnn._linear_pointwise.binary(x, residual, self._packed, self.bias, "add")
        if self.bias is None and self._plain is not None:
            return torch.addmm(residual, x, self._plain.t())
        return residual + self._multiply(x)

    def silu(self, x: torch.Tensor) -> torch.Tensor:
        """silu(product)."""
        if self._packed is not None:
            return torch.ops.mkldnn._linear_pointwise(x, self._packed, self.bias, "swish", [], "")
        return F.silu(self._multiply(x), inplace=True)

    def times(self, other: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """other * product, elementwise."""
        if self._packed is not None:
            return torch.ops.mkldnn._linear_pointwise.binary(x, other, self._packed, self.bias, "mul")
        return self._multiply(x).mul_(other)

    def _multiply(self, x: torch.Tensor) -> torch.Tensor:
        if self._plain is None:
            raise RuntimeError(
                f"a weight matrix of shape {self.shape} has no content: it was released, or never sealed"
            )
        return F.linear(x, self._plain, self.bias)
