"""Flags from YAML: `--custom-config-path` (above the command line) and `--config` (FSDP, below it)."""

from __future__ import annotations

import base64
import binascii
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from miles.arguments.args import ALL_FLAGS, FLAGS, Args
from miles.arguments.flag import BadValue
from miles.arguments.parser import did_you_mean, near
from miles.arguments.values import coerce

logger = logging.getLogger(__name__)
BASE64 = "base64:"
_MISSPELT = 0.85  # a key this close to a flag's name is taken for a misspelling of it


class ConfigFileError(ValueError):
    """A configuration file that cannot be read as a mapping."""


def read_mapping(source: str, option: str) -> dict[str, Any]:
    """The mapping in a YAML or JSON file, or in a `base64:` payload.

    Raises: ConfigFileError naming `option`.
    """
    if source.startswith(BASE64):
        try:
            text = base64.b64decode(source[len(BASE64) :], validate=True).decode()
        except (binascii.Error, UnicodeDecodeError) as error:
            raise ConfigFileError(f"{option}: not base64 of text: {error}") from None
        name = "its base64 payload"
    else:
        file = Path(source)
        if not file.is_file():
            raise ConfigFileError(f"{option} {source}: no such file")
        text, name = file.read_text(encoding="utf-8"), source
    try:
        parsed = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ConfigFileError(f"{option}: {name} is not YAML: {error}") from None
    if parsed is None:
        return {}
    if not isinstance(parsed, dict):
        raise ConfigFileError(f"{option}: {name} must hold a mapping of names to values, not a {type(parsed).__name__}")
    return {str(key).replace("-", "_"): value for key, value in parsed.items()}


def apply_custom_config(args: Args) -> list[str]:
    """Set what `--custom-config-path` says, over the command line. Returns problems.

    Keys that are flags are typed and checked as on the command line; others become attributes, unless they look like a
    misspelt flag.
    """
    option = "--custom-config-path"
    if args.custom_config_path is None:
        return []
    try:
        mapping = read_mapping(args.custom_config_path, option)
    except ConfigFileError as error:
        return [str(error)]
    problems = []
    for key in mapping:
        if key in ALL_FLAGS:
            continue
        if hasattr(Args, key) or key.startswith("_"):
            problems.append(f"{option}: {key} is a name that the arguments use themselves; choose another")
        elif not hasattr(args, key) and near(key, FLAGS, _MISSPELT):
            problems.append(f"{option}: {key} is no flag{did_you_mean(key, FLAGS)}")
    known = {k: v for k, v in mapping.items() if k in ALL_FLAGS}
    problems += _set(args, known, option)
    for key, value in mapping.items():
        if key not in ALL_FLAGS:
            args.set_attribute(key, value)
    return problems


def apply_fsdp_config(args: Args) -> list[str]:
    """Set what `--config` says where the command line says nothing. Returns problems."""
    if args.config is None or args.train_backend == "megatron":
        return []
    try:
        mapping = read_mapping(args.config, "--config")
    except ConfigFileError as error:
        return [str(error)]
    allowed = {n: f for n, f in FLAGS.items() if f.owner == "fsdp" or f.group in _FSDP_GROUPS or n in _FSDP_NAMES}
    problems = [f"--config: {key} is no FSDP flag{did_you_mean(key, allowed)}" for key in mapping if key not in allowed]
    known = {k: v for k, v in mapping.items() if k in allowed and k not in args.given}
    return problems + _set(args, known, "--config")


_FSDP_NAMES = ("deterministic_mode", "context_parallel_size", "wandb_project", "wandb_run_name", "tensorboard_dir")
_FSDP_GROUPS = ("Optimizer and schedule", "Precision")


def _set(args: Args, values: Mapping[str, Any], option: str) -> list[str]:
    problems = []
    for name, value in values.items():
        try:
            typed = coerce(ALL_FLAGS[name], value, source=f"{option}: {name}")
        except BadValue as error:
            problems.append(str(error))
            continue
        if name in args.given and getattr(args, name) != typed:
            logger.info("%s: %s = %r overrides %r", option, name, typed, getattr(args, name))
        args.set_given(name, typed)
    return problems
