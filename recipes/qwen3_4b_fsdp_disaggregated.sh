#!/usr/bin/env bash
# GRPO on Qwen3-4B, FSDP trainer and SGLang on GPUs of their own, one step ahead of each other. Evidence: not verified (no full curve).
#
# One node of 8 GPUs, half for each side; mathematics with answers that are compared (dapo-math-17k, or your own rows {"prompt", "label"}).
#
#   bash recipes/qwen3_4b_fsdp_disaggregated.sh [flags of train_async.py; they come last, so they win]
#   bash recipes/qwen3_4b_fsdp_disaggregated.sh --dry-run                  # on any machine
#
# MILES_SCRIPT_PYTHON      interpreter with miles and SGLang installed   (python)
# MILES_SCRIPT_MODEL       Hugging Face directory                         (models/Qwen3-4B)
# MILES_SCRIPT_DATA        JSONL of prompts                               (data/dapo-math-17k.jsonl)
# MILES_SCRIPT_GPUS        GPUs of the node                               (8)
# MILES_SCRIPT_RUN_NAME    the run; its folder is runs/<name>              (qwen3-4b-fsdp-disaggregated)
# Those of scripts/launch.py (MILES_SCRIPT_NUM_NODES, ...) are read too. The same command resumes.
set -euo pipefail
cd "$(dirname "$0")/.."

name=Qwen3-4B
layout=disaggregated
source recipes/common/qwen3_math_fsdp.sh "$@"
