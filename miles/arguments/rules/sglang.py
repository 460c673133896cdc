"""The SGLang that engines run: that it is there, that it has the options asked for, and what this version does with it."""

from __future__ import annotations

from collections.abc import Iterator

from miles.arguments.args import Args
from miles.arguments.rules.rule import Rule, RuleSet
from miles.arguments.systems import missing, works
from miles.backends.sglang_utils.command import RESERVED, unknown_options
from miles.backends.sglang_utils.installation import SglangMissing, installed


def _launched(a: Args) -> bool:
    return a.rollout_engine == "sglang" and not a.debug_train_only


def _ranks(a: Args) -> int:
    """Devices that the given parallel sizes need; data-parallel attention and expert parallelism share those of TP."""
    tp, pp = a.sglang_tp_size, a.sglang_pp_size or 1
    return (tp or max(a.rollout_num_gpus_per_engine // pp, 1)) * pp


def installation(a: Args) -> Iterator[str]:
    """SGLang is not there, or does not have an option. Asks its interpreter, which takes seconds the first time."""
    if not _launched(a):
        return
    try:
        yield from unknown_options(a, installed(a.sglang_python))
    except SglangMissing as error:
        yield f"--rollout-engine sglang: {error}"


def reserved(a: Args) -> Iterator[str]:
    """Options that every launch sets by itself."""
    given = [f"--sglang-{name.replace('_', '-')}" for name in RESERVED if getattr(a, f"sglang_{name}") is not None]
    if given:
        verb, drop = ("is", "it") if len(given) == 1 else ("are", "them")
        yield f"{', '.join(given)} {verb} set for each engine by the run: drop {drop}"


RULES = (
    RuleSet("sglang-installation", installation),
    RuleSet("sglang-reserved", reserved),
    Rule(
        "sglang-device",
        lambda a: _launched(a) and a.train_device == "cuda" and not works("sglang-gpu"),
        lambda a: missing("sglang-gpu", "--rollout-engine sglang on GPUs") + " and set --rollout-engine embedded",
    ),
    Rule(
        "sglang-sizes",
        lambda a: _launched(a) and _ranks(a) != a.rollout_num_gpus_per_engine,
        lambda a: (
            f"an engine of --rollout-num-gpus-per-engine {a.rollout_num_gpus_per_engine} devices cannot have "
            f"{a.options(n for n in ('sglang_tp_size', 'sglang_pp_size') if getattr(a, n) is not None)}, "
            f"which need {_ranks(a)}"
        ),
    ),
    Rule(
        "sglang-verified-ranks",
        lambda a: _launched(a) and a.rollout_num_gpus_per_engine > 1 and a.verify_weight_update,
        "the weights of an SGLang engine of {rollout_num_gpus_per_engine} ranks cannot be verified by digest yet: set "
        "--rollout-num-gpus-per-engine 1, or --no-verify-weight-update",
    ),
)
