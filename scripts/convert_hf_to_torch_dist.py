"""Write a Hugging Face directory as a torch_dist checkpoint of the Megatron trainer.

    python scripts/convert_hf_to_torch_dist.py --hf-checkpoint MODEL --save DIR
    torchrun --nproc-per-node 8 scripts/convert_hf_to_torch_dist.py --hf-checkpoint MODEL --save DIR    # shares the memory

The trainer needs no conversion: it reads MODEL as it is. A checkpoint is for what reads torch_dist only, and for
`--load DIR --finetune`. Any layout loads it. Flags of a launch command may be given too; those that describe the
architecture are compared with MODEL's config.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from miles.arguments.args import Args
from miles.arguments.parse import read_command_line
from miles.arguments.parser import ArgumentsError
from miles.arguments.rules import architecture, megatron_model


def problems(args: Args) -> list[str]:
    missing = [
        option for option, value in (("--hf-checkpoint", args.hf_checkpoint), ("--save", args.save)) if not value
    ]
    if missing:
        return [f"{option} is needed" for option in missing]
    if not (Path(args.hf_checkpoint) / "config.json").is_file():
        return [f"--hf-checkpoint {args.hf_checkpoint}: no config.json there"]
    args.train_backend, args.train_device = "megatron", "cpu"
    args.pipeline_model_parallel_size = int(os.environ.get("WORLD_SIZE", 1))  # ranks share the model as stages
    return [*architecture.differences(args), *megatron_model.problems(args)]


def main() -> int:
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    if not sys.argv[1:] or {"-h", "--help"} & set(sys.argv[1:]):
        print(__doc__)
        return 0
    try:
        args = read_command_line(sys.argv[1:])
        if wrong := problems(args):
            raise ArgumentsError(wrong)
    except ArgumentsError as error:
        print(error, file=sys.stderr)
        return 2
    from miles.backends.megatron_utils.conversion import conversion_ranks, to_torch_dist

    with conversion_ranks():
        folder = to_torch_dist(Path(args.hf_checkpoint), Path(args.save), trust_remote_code=args.trust_remote_code)
    print(f"wrote {folder}")
    return 0


if __name__ == "__main__":  # writing starts a helper process, which imports this file again
    raise SystemExit(main())
