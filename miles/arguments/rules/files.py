"""Files that must be there before anything starts: model directories, checkpoints, folders to write to."""

from __future__ import annotations

import json
import os
import string
from collections.abc import Iterator
from pathlib import Path

from miles.arguments.args import FLAGS, Args
from miles.arguments.resolve import TRACKER, has_checkpoint
from miles.arguments.rules.rule import Rule, RuleSet
from miles.backends.training_utils.checkpoint import CheckpointError, resolve_load


def model_directories(args: Args) -> Iterator[str]:
    from miles.backends.training_utils.model_dir import ModelDirError, check_model_dir

    if args.hf_checkpoint is None:
        yield "--hf-checkpoint is required: a Hugging Face model directory"
        return
    wanted = [("--hf-checkpoint", args.hf_checkpoint, True)]
    if (args.use_kl_loss or args.kl_coef != 0) and args.ref_load not in (None, args.hf_checkpoint):
        wanted.append(("--ref-load", args.ref_load, False))
    for option, path, needs_tokenizer in wanted:
        try:
            check_model_dir(path, option, needs_tokenizer=needs_tokenizer)
        except ModelDirError as error:
            yield str(error)


def named_files(args: Args) -> Iterator[str]:
    for name, flag in FLAGS.items():
        value = getattr(args, name)
        if flag.path is None or value is None or name == "config" or name not in args.given:
            continue
        there = os.path.isfile(value) if flag.path == "file" else os.path.isdir(value)
        if not there:
            yield f"{flag.option} {value}: no such {'file' if flag.path == 'file' else 'directory'}"


def chat_template(args: Args) -> Iterator[str]:
    if not args.apply_chat_template or args.chat_template_path or not args.hf_checkpoint:
        return
    directory = Path(args.hf_checkpoint)
    config = directory / "tokenizer_config.json"
    if (
        not config.is_file()
        or (directory / "chat_template.jinja").is_file()
        or (directory / "chat_template.json").is_file()
    ):
        return
    try:
        has_template = "chat_template" in json.loads(config.read_text(encoding="utf-8"))
    except ValueError as error:
        yield f"--hf-checkpoint {directory}: tokenizer_config.json is not JSON: {error}"
        return
    if not has_template:
        yield (
            f"--apply-chat-template: the tokenizer in {directory} has no chat template: set --chat-template-path, or drop "
            "--apply-chat-template and give finished prompts"
        )


def output_folders(args: Args) -> Iterator[str]:
    outputs = {"--run-dir": args.run_dir, "--save": args.save, "--dump-details": args.dump_details}
    if args.save_hf:
        outputs["--save-hf"] = args.save_hf.split("{")[0] or "."
    for option, path in outputs.items():
        if path is None:
            continue
        existing = Path(path)
        while not existing.exists():
            existing = existing.parent
        if not existing.is_dir():
            yield f"{option} {path}: {existing} is a file, so the folder cannot be made"
        elif not os.access(existing, os.W_OK):
            yield f"{option} {path}: {existing} is not writable"


def checkpoint_to_load(args: Args) -> Iterator[str]:
    """A `--load` that has nothing to resume from, is damaged, or belongs to another model than the run's."""
    if args.load is None or args.debug_rollout_only:
        return
    folder = Path(args.load)
    try:
        found = resolve_load(folder, args.ckpt_step)
        if found is not None:
            _check_model(args, found[0].path(found[1]))
            return
    except CheckpointError as error:
        yield str(error) if "--load" in str(error) else f"--load {folder}: {error}"
        return
    if not folder.is_dir():
        yield f"--load {folder}: no such folder; for a fresh start leave it out, or name the folder of --save"
    elif (folder / "config.json").is_file():
        yield f"--load {folder} is a Hugging Face directory, not a folder of checkpoints: pass it as --hf-checkpoint"
    else:
        yield f"--load {folder} holds no finished checkpoint ({TRACKER} is missing): leave --load out to start afresh"


def _check_model(args: Args, checkpoint: Path) -> None:
    """Raises: CheckpointError."""
    from miles.backends.training_utils.model_identity import check_before_loading

    config = Path(args.hf_checkpoint or "") / "config.json"
    if args.hf_checkpoint and config.is_file():  # else another rule reports it
        check_before_loading(checkpoint, args.hf_checkpoint)


# Templates of file names: the placeholders that a template knows, and those that it must have.
TEMPLATES: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "save_hf": (("rollout_id",), ()),
    "save_debug_rollout_data": (("rollout_id",), ("rollout_id",)),
    "load_debug_rollout_data": (("rollout_id",), ()),
    "save_debug_trajectory_data": (("rollout_id",), ("rollout_id",)),
    "save_debug_train_data": (("rollout_id", "rank"), ("rollout_id", "rank")),
}


def templates(args: Args) -> Iterator[str]:
    for name, (known, needed) in TEMPLATES.items():
        value, option = getattr(args, name), FLAGS[name].option
        if value is None:
            continue
        placeholders = " and ".join("{" + n + "}" for n in known)
        try:
            fields = {field for _, field, _, _ in string.Formatter().parse(value) if field is not None}
            value.format(**dict.fromkeys(known, 0))
        except (ValueError, KeyError, IndexError):
            yield f"{option} {value}: only {placeholders} can be filled in"
            continue
        if not set(needed) <= fields:
            yield f"{option} {value} must contain {placeholders}, or files would overwrite each other"


RULES = (
    RuleSet("template", templates),
    RuleSet("model-directory", model_directories),
    RuleSet("file-exists", named_files),
    RuleSet("chat-template", chat_template),
    RuleSet("output-folder", output_folders),
    RuleSet("checkpoint-to-load", checkpoint_to_load),
    Rule(
        "save-over-another-run",
        lambda a: has_checkpoint(a.save) and a.load is None and not a.debug_rollout_only,
        "--save {save} holds checkpoints of another run: set --load to the same folder to continue it, or choose a new folder",
    ),
)
