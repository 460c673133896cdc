"""On-policy distillation."""

from __future__ import annotations

import os

from miles.arguments.args import Args
from miles.arguments.rules.conflict import Clash, excludes, requires
from miles.arguments.rules.rule import Rule, about


def _in_engines(a: Args) -> bool:
    return a.use_opd and a.opd_type == "sglang"


def _in_trainer(a: Args) -> bool:
    return a.use_opd and a.opd_type == "megatron"


def _bad_urls(a: Args) -> list[str]:
    pairs = [entry.partition("=") for entry in a.opd_teacher_urls or []]
    return [f"{name}{sign}{url}" for name, sign, url in pairs if not (name and url.startswith(("http://", "https://")))]


RULES = about(
    "opd",
    requires("opd-has-a-type", "--use-opd", lambda a: a.use_opd, Clash("--opd-type", lambda a: a.opd_type)),
    excludes(
        "teacher-in-engines",
        "--opd-type sglang",
        _in_engines,
        Clash("--opd-teacher-load (the teacher runs in engines)", lambda a: a.opd_teacher_load is not None),
    ),
    excludes(
        "teacher-in-trainer",
        "--opd-type megatron",
        _in_trainer,
        Clash("--opd-teacher-urls", lambda a: a.opd_teacher_urls),
        Clash("--opd-log-prob-top-k", lambda a: a.opd_log_prob_top_k > 0),
    ),
    Rule(
        "teacher-exists",
        lambda a: _in_trainer(a) and not (a.opd_teacher_load and os.path.isdir(a.opd_teacher_load)),
        "--opd-type megatron loads the teacher from --opd-teacher-load, which must be an existing folder, not {opd_teacher_load}",
    ),
    Rule(
        "teacher-addresses",
        _bad_urls,
        lambda a: f"--opd-teacher-urls takes NAME=http://..., not {', '.join(_bad_urls(a))}",
    ),
    Rule(
        "top-k-of-the-teacher",
        lambda a: a.use_opd and a.opd_log_prob_top_k > 0 and a.opd_top_k_strategy != "only-teacher",
        "--opd-top-k-strategy {opd_top_k_strategy} needs the student's likeliest tokens, which engines do not return here: set only-teacher",
    ),
)
