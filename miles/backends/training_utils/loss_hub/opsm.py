"""Off-policy sequence masking: drop tokens with a negative advantage from sequences that the policy has left behind.

Source: DeepSeek-AI 2025, DeepSeek-V3.2, "off-policy sequence masking".
"""

from __future__ import annotations

from torch import Tensor


def opsm_keep(advantages: Tensor, sequence_log_ratio: Tensor, delta: float) -> Tensor:
    """1.0 at tokens that stay, `[R]`.

    Args:
        advantages: `[R]`.
        sequence_log_ratio: mean over the sequence's trainable tokens of log p - log p_old, repeated, `[R]`.
        delta: `--opsm-delta`; a sequence with mean log p_old - log p above it has drifted.
    """
    dropped = (advantages < 0) & (-sequence_log_ratio > delta)
    return (~dropped).float()
