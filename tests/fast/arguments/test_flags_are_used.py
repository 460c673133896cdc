"""A flag that nothing reads would be accepted in silence; every flag that works is read somewhere."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from miles.arguments.args import ALL_FLAGS, FLAGS
from miles.arguments.systems import works

REPO = Path(__file__).resolve().parents[3]
# Files of the arguments package that act on flags, rather than only declare or check them.
ACTING = ("resolve.py", "config_files.py", "extra_flags.py")
# Flags with one working value, or whose work is done by being checked.
CHECKED_ONLY = {
    "critic_num_gpus_per_node": "the critic is on the trainer's devices",
    "critic_num_nodes": "the critic is on the trainer's devices",
    "data_pad_size_multiplier": "Megatron pads, FSDP packs",
    "deterministic_mode": "CPU runs are deterministic; refused on GPUs",
    "distributed_backend": "one working value",
    "fsdp_cpu_backend": "one working value",
    "ft_components": "one working value",
    "megatron_to_hf_mode": "one working value",
    "num_gpus_per_node": "of SGLang engines",
    "object_store_backend": "one working value",
    "rollout_submission_granularity": "one working value",
}


def _words() -> set[str]:
    package = REPO / "miles" / "arguments"
    files = [p for p in (REPO / "miles").rglob("*.py") if package not in p.parents]
    files += [REPO / "train.py", REPO / "train_async.py"]
    words = set(re.findall(r"\b[a-z][a-z0-9_]+\b", "\n".join(p.read_text() for p in files)))
    acting = "\n".join((package / name).read_text() for name in ACTING)
    return words | set(re.findall(r"\b(?:a|args)\.([a-z][a-z0-9_]+)\b", acting))


def test_every_working_flag_is_read():
    words = _words()
    described = ("Architecture",)  # compared with the Hugging Face config
    unread = [
        name
        for name, flag in FLAGS.items()
        if works(flag.system) and flag.dead is None and not flag.group.startswith(described) and name not in words
    ]
    assert sorted(set(unread) - set(CHECKED_ONLY)) == []


@pytest.mark.parametrize("folder", ["recipes", "scripts"])
def test_recipes_use_flags_that_exist(folder):
    known = {option for flag in ALL_FLAGS.values() for option in (*flag.options, *flag.off_options)}
    unknown = []
    for script in sorted((REPO / folder).glob("*.sh")):
        for number, line in enumerate(script.read_text().splitlines(), start=1):
            match = re.match(r"\s+(--[a-z][a-z0-9-]+)(?:\s|$)", line)
            if match and match[1] not in known:
                unknown.append(f"{script.name}:{number}: {match[1]}")
    assert unknown == []
