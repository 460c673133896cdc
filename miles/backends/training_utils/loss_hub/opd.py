"""On-policy distillation: a per-token pull towards a teacher, taken off the advantages. Source: Miles v0.1 article."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor


def reverse_kl(
    student_log_probs: Sequence[Tensor] | None,
    teacher_log_probs: Sequence[Tensor] | None,
    given: Sequence[Tensor] | None,
) -> list[Tensor]:
    """log p_student - log p_teacher of each sampled token, or the column `opd_reverse_kl` where the batch brings one.

    Raises: ValueError saying which side is missing or has another length.
    """
    if given is not None:
        return [x.detach() for x in given]
    if student_log_probs is None or teacher_log_probs is None:
        side = "student's (log_probs)" if student_log_probs is None else "teacher's (teacher_log_probs)"
        raise ValueError(f"--use-opd needs log-probs of student and teacher; the {side} are missing from the batch")
    wrong = [i for i, (s, t) in enumerate(zip(student_log_probs, teacher_log_probs, strict=True)) if s.shape != t.shape]
    if wrong:
        raise ValueError(f"--use-opd: teacher log-probs of samples {wrong} are not as long as the student's")
    return [(s - t).detach() for s, t in zip(student_log_probs, teacher_log_probs, strict=True)]


def distill(args: Any, advantages: Sequence[Tensor], kl: Sequence[Tensor]) -> list[Tensor]:
    """A_t - opd_kl_coef x reverse KL_t; both fp32 `[response]` a sample."""
    wrong = [i for i, (a, d) in enumerate(zip(advantages, kl, strict=True)) if a.shape != d.shape]
    if wrong:
        raise ValueError(f"--use-opd: reverse KL and advantages of samples {wrong} differ in length")
    return [a - float(args.opd_kl_coef) * d for a, d in zip(advantages, kl, strict=True)]
