"""Write a checkpoint of the Megatron trainer as a Hugging Face directory.

    python scripts/convert_torch_dist_to_hf.py --input-dir RUN/checkpoints/iter_0000007 --origin-hf-dir MODEL --output-dir OUT
    torchrun --nproc-per-node 8 scripts/convert_torch_dist_to_hf.py ...          # shares the memory

Dtypes, config and tokenizer are those of MODEL, which the run started from (its --hf-checkpoint).
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

from miles.backends.training_utils.checkpoint import CheckpointError, CheckpointStore
from miles.backends.training_utils.model_identity import check_before_loading


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--input-dir", type=Path, required=True, help="an iter_N folder, or the folder of several: the latest"
    )
    parser.add_argument("--origin-hf-dir", type=Path, required=True, help="the model that the run started from")
    parser.add_argument("--output-dir", type=Path, required=True, help="the new Hugging Face directory")
    parser.add_argument("-f", "--force", action="store_true", help="replace what is at --output-dir")
    parser.add_argument("--trust-remote-code", action="store_true", help="run Python code of --origin-hf-dir")
    return parser


def checkpoint_folder(given: Path) -> Path:
    """A complete checkpoint. Raises: CheckpointError."""
    name = given.name.removeprefix("iter_")
    if name.isdecimal():
        return CheckpointStore(given.parent).verify(int(name))
    store = CheckpointStore(given)
    latest = store.latest()
    if latest is None:
        raise CheckpointError(f"--input-dir {given} has no checkpoint")
    return store.verify(latest)


def main() -> int:
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    options = build_parser().parse_args()
    if options.output_dir.exists() and not options.force:
        print(f"--output-dir {options.output_dir} exists: choose another, or replace it with --force", file=sys.stderr)
        return 2
    from miles.backends.megatron_utils.conversion import conversion_ranks, to_hf

    try:
        folder = checkpoint_folder(options.input_dir)
        check_before_loading(folder, options.origin_hf_dir)
        with conversion_ranks():
            to_hf(folder, options.origin_hf_dir, options.output_dir, trust_remote_code=options.trust_remote_code)
    except (CheckpointError, ValueError, RuntimeError) as error:
        print(error, file=sys.stderr)
        return 1
    print(f"wrote {options.output_dir}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
