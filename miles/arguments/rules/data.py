"""Prompt data, read before anything starts as far as that takes a moment: files, rows, and what their rewards need."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from miles.arguments.args import Args
from miles.arguments.resolve import BUILT_IN_ROLLOUTS, DATA_SOURCE
from miles.arguments.rules.rule import RuleSet

if TYPE_CHECKING:
    from miles.rollout.dataset import DatasetKeys

_SOURCES = (DATA_SOURCE, "miles.rollout.data_source.RolloutDataSource")
_OWN_GENERATE = "miles.rollout.generate_hub."


def _reads_prompts(args: Args) -> bool:
    """Whether the built-in data source reads `--prompt-data`."""
    return args.data_source_path in _SOURCES and args.rollout_global_dataset and not args.load_debug_rollout_data


def _scores(args: Args) -> bool:
    """Whether the built-in rollout function asks for rewards."""
    return args.rollout_function_path in BUILT_IN_ROLLOUTS and not args.debug_train_only


def _fills_no_labels(args: Args) -> bool:
    """Whether a sample's label is the data's: no generate function of the user's own could set it."""
    generate = args.custom_generate_function_path
    return generate is None or generate.startswith(_OWN_GENERATE)


def prompt_data(args: Args) -> Iterator[str]:
    """What is wrong with prompts that the built-in data source would read."""
    from miles.rollout.dataset import DatasetKeys

    if not _reads_prompts(args):
        return
    if args.prompt_data is None:
        yield "--prompt-data is required: prompts to train on (or --data-source-path, --disable-rollout-global-dataset)"
        return
    yield from _problems_of(args, args.prompt_data, DatasetKeys.of_run(args), scored=_scores(args))


def eval_data(args: Args) -> Iterator[str]:
    from miles.rollout.dataset import DatasetKeys
    from miles.rollout.eval_config import load_eval_configs

    if args.eval_interval is None or (args.eval_config and args.eval_prompt_data):
        return
    try:
        datasets = load_eval_configs(args)
    except ValueError as error:
        yield str(error)
        return
    scored = args.eval_function_path in BUILT_IN_ROLLOUTS and not args.debug_train_only
    for dataset in datasets:
        own = dataset.metadata_overrides | ({"rm_type": dataset.rm_type} if dataset.rm_type else {})
        yield from _problems_of(args, dataset.path, DatasetKeys.of_eval(args, dataset), scored=scored, overrides=own)


def _problems_of(
    args: Args, spec: str, keys: DatasetKeys, *, scored: bool, overrides: dict[str, Any] | None = None
) -> Iterator[str]:
    from miles.rollout.dataset import look_at_prompt_rows
    from miles.rollout.rm_hub import label_problems, prompt_row_problems

    rows, wrong = look_at_prompt_rows(spec, keys)
    yield from wrong
    if not scored or args.custom_rm_path is not None:
        return
    yield from prompt_row_problems(args, rows, overrides)
    if _fills_no_labels(args):
        yield from label_problems(args, rows, keys, overrides)


def unread_labels(args: Args) -> Iterator[str]:
    """A column `label` that no flag names, where the reward may want it."""
    from miles.rollout.dataset import columns_of
    from miles.rollout.rm_hub.registry import split_rm_type

    if not (_reads_prompts(args) and _scores(args)) or args.label_key is not None or args.prompt_data is None:
        return
    try:
        used = args.custom_rm_path is not None or split_rm_type(args.rm_type or "")[0].label == "used"
    except ValueError:
        return
    if used and "label" in columns_of(args.prompt_data):
        reward = args.custom_rm_path or f"--rm-type {args.rm_type}"
        yield f"--prompt-data has a column label that is not read: set --label-key label if {reward} compares with it"


RULES = (RuleSet("prompt-data", prompt_data), RuleSet("eval-data", eval_data))
WARNINGS = (RuleSet("label-is-read", unread_labels),)
