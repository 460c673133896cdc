"""Failures of a weight update, and what they say about the engines."""

from __future__ import annotations


class WeightTransferError(RuntimeError):
    """The trainer could not deliver its weights.

    `touched`: indices of engines that may have loaded some of them. The others still hold their version, whole.
    """

    def __init__(self, message: str, touched: frozenset[int]) -> None:
        super().__init__(message)
        self.touched = touched

    def __reduce__(self) -> tuple:
        return type(self), (str(self), self.touched)  # crosses process borders with its fields
