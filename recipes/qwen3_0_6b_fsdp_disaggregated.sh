#!/usr/bin/env bash
# GRPO on Qwen3-0.6B, FSDP trainer and SGLang on GPUs of their own, one step ahead of each other. Evidence: not verified (no full curve).
#
# One node of 8 GPUs, half for each side; mathematics with answers that are compared (dapo-math-17k, or your own rows {"prompt", "label"}).
#
#   bash recipes/qwen3_0_6b_fsdp_disaggregated.sh [flags of train_async.py; they come last, so they win]
#   bash recipes/qwen3_0_6b_fsdp_disaggregated.sh --dry-run                  # on any machine
#
# MILES_SCRIPT_PYTHON      interpreter with miles and SGLang installed   (python)
# MILES_SCRIPT_MODEL       Hugging Face directory                         (models/Qwen3-0.6B)
# MILES_SCRIPT_DATA        JSONL of prompts                               (data/dapo-math-17k.jsonl)
# MILES_SCRIPT_GPUS        GPUs of the node                               (8)
# MILES_SCRIPT_RUN_NAME    the run; its folder is runs/<name>              (qwen3-0.6b-fsdp-disaggregated)
# Those of scripts/launch.py (MILES_SCRIPT_NUM_NODES, ...) are read too. The same command resumes.
set -euo pipefail
cd "$(dirname "$0")/.."

python="${MILES_SCRIPT_PYTHON:-python}"
model="${MILES_SCRIPT_MODEL:-models/Qwen3-0.6B}"
data="${MILES_SCRIPT_DATA:-data/dapo-math-17k.jsonl}"
gpus="${MILES_SCRIPT_GPUS:-8}"
run="${MILES_SCRIPT_RUN_NAME:-qwen3-0.6b-fsdp-disaggregated}"

CLUSTER_ARGS=(
    --train-backend fsdp
    --train-device cuda
    --actor-num-nodes 1
    --actor-num-gpus-per-node $((gpus / 2))
    --num-gpus-per-node "$gpus"
    --rollout-num-gpus $((gpus / 2))
)

CHECKPOINT_ARGS=(
    --hf-checkpoint "$model"
    --load "checkpoints/$run"
    --save "checkpoints/$run"
    --save-interval 20
)

ROLLOUT_ARGS=(
    --prompt-data "$data"
    --input-key prompt
    --label-key label
    --apply-chat-template
    --rollout-shuffle
    --rm-type deepscaler
    --num-rollout 300
    --rollout-batch-size 32
    --n-samples-per-prompt 8
    --rollout-max-response-len 8192
    --rollout-temperature 1
)

SGLANG_ARGS=(
    --rollout-engine sglang
    --rollout-num-gpus-per-engine 1
    --sglang-mem-fraction-static 0.85
    --sglang-cuda-graph-max-bs 256
)

GRPO_ARGS=(
    --advantage-estimator grpo
    --global-batch-size 256
    --use-dynamic-batch-size
    --max-tokens-per-gpu 9216
    --balance-data
    --eps-clip 0.2
    --eps-clip-high 0.28
    --gradient-checkpointing
    --lr 1e-6
    --lr-decay-style constant
    --weight-decay 0.1
    --adam-beta2 0.98
)

exec "$python" scripts/launch.py --driver train_async.py -- --run-name "$run" \
    "${CLUSTER_ARGS[@]}" "${CHECKPOINT_ARGS[@]}" "${ROLLOUT_ARGS[@]}" "${SGLANG_ARGS[@]}" "${GRPO_ARGS[@]}" "$@"
