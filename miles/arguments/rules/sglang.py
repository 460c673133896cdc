"""The SGLang that engines run: that it is there, that it has the options asked for, and what this version does with it."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

from miles.arguments.args import Args
from miles.arguments.rules.rule import Rule, RuleSet
from miles.backends.engine_api.topology import EngineSpec, TopologyError, engine_args, plan_engines
from miles.backends.sglang_utils.command import RESERVED, unknown_options
from miles.backends.sglang_utils.installation import SglangMissing, installed
from miles.backends.sglang_utils.versions import lacking, untried


def _launched(a: Args) -> bool:
    return a.rollout_engine == "sglang" and not a.debug_train_only and not a.rollout_external


def _engines(a: Args) -> list[tuple[EngineSpec, Args]]:
    """Engines of different sizes or options, with the arguments that each is started by; none where they cannot be."""
    try:
        specs = plan_engines(a) if _launched(a) else []
    except TopologyError:
        return []
    different = {(s.devices, s.kind, s.model, str(s.overrides)): s for s in specs}
    return [(spec, engine_args(a, spec)) for spec in different.values()]


def _ranks(a: Args) -> int:
    """Devices that the given parallel sizes need; data-parallel attention and expert parallelism share those of TP."""
    tp, pp = a.sglang_tp_size, a.sglang_pp_size or 1
    return (tp or max(a.rollout_num_gpus_per_engine // pp, 1)) * pp


def topology(a: Args) -> Iterator[str]:
    """Engines that cannot be: a YAML that says nonsense, sizes that do not fit."""
    try:
        plan_engines(a)
    except TopologyError as error:
        yield from error.problems


def installation(a: Args) -> Iterator[str]:
    """SGLang is not there, or does not have an option. Asks its interpreter, which takes seconds the first time."""
    if not _launched(a):
        return
    try:
        found = installed(a.sglang_python)
    except SglangMissing as error:
        # A plan can be made where the run itself will not be.
        if not a.dry_run:
            yield f"--rollout-engine sglang: {error}"
        return
    problems = [unknown_options(own, found) for _, own in _engines(a)] or [unknown_options(a, found)]
    yield from dict.fromkeys(itertools.chain.from_iterable(problems))
    yield from lacking(a, found)


def not_known(a: Args) -> Iterator[str]:
    """A release that nobody tried, and, for a plan, an SGLang that is not there."""
    if not _launched(a):
        return
    try:
        if (said := untried(installed(a.sglang_python))) is not None:
            yield said
    except SglangMissing as error:
        if a.dry_run:
            yield f"--sglang-* flags were not compared with what the server takes, which the run itself will do: {error}"


def sizes(a: Args) -> Iterator[str]:
    """Parallel sizes that do not fit the devices of an engine."""
    for spec, own in _engines(a):
        which = f"model {spec.model}: " if a.sglang_config is not None else ""
        given = [n for n in ("sglang_tp_size", "sglang_pp_size") if getattr(own, n) is not None]
        if _ranks(own) != spec.devices:
            yield (
                f"{which}an engine of {spec.devices} devices (--rollout-num-gpus-per-engine) cannot have "
                f"{own.options(given)}, which need {_ranks(own)}"
            )
            continue
        tp = spec.devices // (own.sglang_pp_size or 1)
        for name in ("sglang_dp_size", "sglang_ep_size"):
            size = getattr(own, name)
            if size is not None and tp % size:
                yield f"{which}{own.options([name])} does not divide the engine's tensor-parallel size {tp}"


def reserved(a: Args) -> Iterator[str]:
    """Options that every launch sets by itself."""
    given = [f"--sglang-{name.replace('_', '-')}" for name in RESERVED if getattr(a, f"sglang_{name}") is not None]
    if given and not a.rollout_external:  # of a server that runs already, the keys are told by them
        verb, drop = ("is", "it") if len(given) == 1 else ("are", "them")
        yield f"{', '.join(given)} {verb} set for each engine by the run: drop {drop}"


def _several_ranks(a: Args) -> int:
    return max((spec.devices for spec, _ in _engines(a) if spec.trained), default=1)


RULES = (
    RuleSet("engine-topology", topology),
    RuleSet("sglang-installation", installation),
    RuleSet("sglang-reserved", reserved),
    RuleSet("sglang-sizes", sizes),
    Rule(
        "sglang-pipeline-updates",
        lambda a: (
            any((own.sglang_pp_size or 1) > 1 for spec, own in _engines(a) if spec.trained)
            and a.update_weight_transfer_mode == "broadcast"
            and not (a.debug_rollout_only or a.debug_skip_weight_update)
        ),
        "--sglang-pp-size above 1: SGLang gives the ranks of all its pipeline stages the same places in a weight group, so "
        "--update-weight-transfer-mode broadcast cannot reach them: use tensor parallelism alone",
    ),
    Rule(
        "sglang-verified-ranks",
        lambda a: _several_ranks(a) > 1 and a.verify_weight_update,
        lambda a: (
            f"the weights of an SGLang engine of {_several_ranks(a)} ranks cannot be verified by digest yet: set "
            "--rollout-num-gpus-per-engine 1, or --no-verify-weight-update"
        ),
    ),
)
WARNINGS = (RuleSet("sglang-not-known", not_known),)
