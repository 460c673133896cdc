"""Evaluation engines, dashboard, dumps."""

from __future__ import annotations

from miles.arguments.args import Args
from miles.arguments.rules.conflict import Clash, excludes, requires
from miles.arguments.rules.rule import Rule, about


def _fleet(a: Args) -> bool:
    return a.eval_num_gpus > 0


def _reuses_exports(a: Args) -> bool:
    return _fleet(a) and a.eval_hf_dir is None and a.save_hf is not None


def _eval_server_options(a: Args) -> list[str]:
    return [name for name in a.given if name.startswith("eval_sglang_")]


EVAL_FLEET = about(
    "eval-fleet",
    Rule(
        "eval-engines-divide",
        lambda a: _fleet(a) and a.eval_num_gpus % a.eval_num_gpus_per_engine != 0,
        "--eval-num-gpus {eval_num_gpus} is not a multiple of --eval-num-gpus-per-engine {eval_num_gpus_per_engine}",
    ),
    Rule(
        "eval-server-options-need-a-fleet",
        lambda a: _eval_server_options(a) and not _fleet(a),
        "--eval-sglang-* options configure engines that only evaluate: set --eval-num-gpus",
    ),
    requires(
        "eval-fleet-needs",
        "--eval-num-gpus",
        _fleet,
        Clash("--eval-interval", lambda a: a.eval_interval),
        Clash("--eval-hf-dir or --save-hf", lambda a: a.eval_hf_dir or a.save_hf),
    ),
    excludes(
        "eval-fleet-alone",
        "--eval-num-gpus",
        _fleet,
        Clash("--colocate", lambda a: a.colocate),
        Clash("--debug-rollout-only", lambda a: a.debug_rollout_only),
        Clash("--debug-train-only", lambda a: a.debug_train_only),
    ),
    Rule(
        "eval-at-exports",
        lambda a: _reuses_exports(a) and (a.save_interval is None or (a.eval_interval or 0) % a.save_interval != 0),
        "evaluation engines that read --save-hf exports need --eval-interval {eval_interval} to be a multiple of --save-interval "
        "{save_interval}; or set --eval-hf-dir",
    ),
)

DASHBOARD = about(
    "dashboard",
    requires(
        "dashboard-needs-dumps",
        "--use-miles-dashboard",
        lambda a: a.use_miles_dashboard,
        Clash("--dump-details", lambda a: a.dump_details),
    ),
)

DUMPER = about(
    "dumper",
    excludes(
        "dumper-alone",
        "--dumper-enable (one rollout, nothing else)",
        lambda a: a.dumper_enable,
        Clash("--use-fault-tolerance", lambda a: a.use_fault_tolerance),
        Clash("--eval-interval", lambda a: a.eval_interval),
        Clash("--save", lambda a: a.save),
    ),
)

RECORDED = about(
    "recorded-checks",
    Rule(
        "injected-data",
        lambda a: (
            (a.ci_inject_rollout_data_path is None) != (a.ci_inject_rollout_data_start_rollout_id is None)
            or (a.ci_inject_rollout_data_path is not None and a.load_debug_rollout_data is not None)
        ),
        "--ci-inject-rollout-data-path and --ci-inject-rollout-data-start-rollout-id go together, and without --load-debug-rollout-data",
    ),
)

RULES = (*EVAL_FLEET, *DASHBOARD, *DUMPER, *RECORDED)
