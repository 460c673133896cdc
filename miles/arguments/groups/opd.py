"""On-policy distillation from a teacher."""

from __future__ import annotations

from miles.arguments.flag import flag, group


@group("On-policy distillation", system="opd", owner="opd")
class OpdArgs:
    use_opd: bool = flag(False, "Take the reverse KL to a teacher off the advantages.")
    opd_type: str | None = flag(
        None, "Where the teacher runs: in engines, or in the trainer.", choices=("sglang", "megatron")
    )
    opd_kl_coef: float = flag(1.0, "Weight of the teacher term.")
    opd_log_prob_top_k: int = flag(0, "Compare this many likeliest tokens; 0 compares the sampled token.", ge=0)
    opd_top_k_strategy: str = flag(
        "only-student",
        "Whose likeliest tokens.",
        choices=("only-student", "only-teacher", "intersection", "union", "xor"),
    )
    opd_reward_weight_mode: str = flag(
        "student_p", "Weights of the compared tokens.", choices=("student_p", "teacher_p", "none")
    )
    opd_topk_per_position: bool = flag(False, "Choose the tokens for every position.")
    opd_teacher_urls: list[str] | None = flag(None, "Teacher servers.", metavar="NAME=URL")
    opd_teacher_key: str = flag("opd_teacher", "Metadata entry that names a sample's teacher.")
    opd_teacher_load: str | None = flag(None, "Teacher checkpoint for the trainer.", metavar="DIR")
    opd_teacher_ckpt_step: int | None = flag(None, "Its iteration.", ge=0)
