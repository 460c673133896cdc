"""Import paths: each is resolved, and its signature checked, before anything starts."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from miles.arguments.args import FLAGS, Args
from miles.arguments.rules.rule import RuleSet
from miles.utils.imports import ImportPathError, check_accepts, load_function


@dataclass(frozen=True)
class Call:
    """How a function is called: that many positional arguments, and keywords by name."""

    positional: int
    keywords: tuple[str, ...] = ()

    def check(self, path: str, target: Any) -> None:
        check_accepts(path, target, positional=self.positional, keywords=self.keywords)


@dataclass(frozen=True)
class Class:
    """A class, called with that many arguments, whose instances have these methods."""

    positional: int
    methods: tuple[str, ...]

    def check(self, path: str, target: Any) -> None:
        if not inspect.isclass(target):
            raise ImportPathError(
                f"{path} must be a class with {', '.join(self.methods)}, not a {type(target).__name__}"
            )
        check_accepts(path, target, positional=self.positional)
        lacking = [
            name for name in self.methods if name not in dir(target)
        ]  # getattr would find the metaclass's __call__
        if lacking:
            raise ImportPathError(f"{path}: class {target.__name__} has no {', '.join(lacking)}")


def _rollout(path: str, target: Any) -> None:
    if not inspect.isclass(target):
        check_accepts(path, target, positional=3, keywords=("evaluation",))
        return
    Class(1, ("__call__",)).check(path, target)
    check_accepts(f"{path}.__call__", target.__call__, positional=2)


def _generate(path: str, target: Any) -> None:
    from miles.rollout.compat import load_generate_function

    load_generate_function(path)


TIS_KEYWORDS = (
    "args",
    "pg_loss",
    "train_log_probs",
    "rollout_log_probs",
    "loss_masks",
    "total_lengths",
    "response_lengths",
    "parallel_state",
    "max_seq_lens",
)

HOOKS: dict[str, Callable[[str, Any], None]] = {
    "rollout": _rollout,
    "generate": _generate,
    "data_source": Class(1, ("get_samples", "add_samples", "save", "load")).check,
    "data_buffer": Class(1, ("put", "get", "get_metrics")).check,
    "buffer_filter": Call(4).check,
    "dynamic_filter": Call(2).check,
    "sample_filter": Call(2).check,
    "all_samples": Call(3).check,
    "data_postprocess": Call(3).check,
    "reward": Call(2).check,
    "reward_post_process": Call(2).check,
    "convert_samples": Call(2).check,
    "rollout_log": Call(5).check,
    "eval_log": Call(4).check,
    "loss": Call(4).check,
    "loss_reducer": Call(4).check,
    "tis": Call(0, TIS_KEYWORDS).check,
    "model_provider": Call(2).check,
    "megatron_init": Call(1).check,
    "before_log_prob": Call(3).check,
    "before_train_step": Call(6).check,
    "post_save": Call(4).check,
    "post_write": Call(3).check,
    "execute_tool": Call(2).check,
    "agent": Call(0, ("base_url", "prompt", "request_kwargs", "metadata")).check,
    "session_samples": Call(2).check,
}


def broken_hooks(args: Args) -> Iterator[str]:
    for name in sorted(args.given):
        flag = FLAGS.get(name)
        if flag is not None and flag.hook is not None and getattr(args, name) is not None:
            yield from problems_of(flag.option, flag.hook, getattr(args, name))
            yield from _broken_settings(args, flag.option, getattr(args, name))


def _broken_settings(args: Args, option: str, path: str) -> Iterator[str]:
    """A function that reads settings of its own may say what is wrong with them: `setting_problems(args)`."""
    try:
        ask = getattr(load_function(path), "setting_problems", None)
    except ImportPathError:
        return
    if ask is not None:
        yield from (f"{option} {path}: {problem}" for problem in ask(args))


def problems_of(option: str, hook: str, path: str) -> Iterator[str]:
    """What is wrong with the import path that `option` gives for a hook of that kind."""
    try:
        HOOKS[hook](path, load_function(path))
    except ImportPathError as error:
        yield f"{option}: {error}"


def engine_and_transport(args: Args) -> Iterator[str]:
    """`--rollout-engine` and `--update-weight-transfer-mode` may be import paths instead of names."""
    for name, names in (("rollout_engine", ENGINES), ("update_weight_transfer_mode", TRANSPORTS)):
        value, option = getattr(args, name), FLAGS[name].option
        if value in names:
            continue
        if "." not in value:
            yield f"{option} must be one of {', '.join(names)}, or an import path, not {value!r}"
            continue
        try:
            load_function(value)
        except ImportPathError as error:
            yield f"{option}: {error}"


def rewards(args: Args) -> Iterator[str]:
    from miles.rollout.rm_hub.validation import reward_problems

    if not args.debug_train_only:
        yield from reward_problems(args)


def sessions(args: Args) -> Iterator[str]:
    """Family, template, matcher: whatever a session server would find out when it starts."""
    from miles.rollout.session.validation import session_problems

    if args.use_session_server is not None and not args.debug_train_only:
        yield from session_problems(args)


def eval_hooks(args: Args) -> Iterator[str]:
    """Generate functions that single evaluation datasets name."""
    from miles.rollout.eval_config import load_eval_configs

    if args.eval_interval is None or args.eval_config is None:
        return
    try:
        datasets = load_eval_configs(args)
    except ValueError:
        return  # the rule on evaluation data reports it
    for dataset in datasets:
        if dataset.custom_generate_function_path is not None:
            option = f"--eval-config {dataset.name}: custom_generate_function_path"
            yield from problems_of(option, "generate", dataset.custom_generate_function_path)


ENGINES = ("sglang", "embedded")
TRANSPORTS = ("broadcast", "ipc", "p2p", "disk-delta")

RULES = (
    RuleSet("hook-is-callable", broken_hooks),
    RuleSet("engine-or-transport", engine_and_transport),
    RuleSet("reward", rewards),
    RuleSet("session", sessions),
    RuleSet("eval-hook", eval_hooks),
)
