#!/usr/bin/env bash
# GRPO on a 2-core CPU, end to end: assets, a supervised warm start, then RL. Evidence: verified (tests/e2e/test_quickstart.py runs it short).
#
# Task: reasoning-gym's spell_backward with a 1 M parameter Qwen3 (scripts/make_quickstart.py says why it is hard enough).
# Parts: 2 FSDP2 trainer ranks over gloo, 2 embedded engines, each a process of its own, broadcast weight updates, each verified.
#
#   bash recipes/quickstart.sh [flags of train.py for the RL run; they come last, so they win]
#
# MILES_SCRIPT_PYTHON     interpreter with miles installed               (python)
# MILES_SCRIPT_ASSETS     where model and data are made                  (build/quickstart, or build/quickstart-seed<seed>)
# MILES_SCRIPT_RUN_NAME   the RL run; its folder is runs/<name>           (quickstart-<time>)
# MILES_SCRIPT_SEED       seed of the assets, the sampling, the trainer   (0)
set -euo pipefail
cd "$(dirname "$0")/.."

python="${MILES_SCRIPT_PYTHON:-python}"
seed="${MILES_SCRIPT_SEED:-0}"
made=build/quickstart
[ "$seed" = 0 ] || made="$made-seed$seed"
assets="${MILES_SCRIPT_ASSETS:-$made}"
run="${MILES_SCRIPT_RUN_NAME:-quickstart-$(date +%Y%m%d-%H%M%S)}"
sft_rollouts=150 # 9600 demonstrations, once
warm_start="$assets/warm-start/$((sft_rollouts - 1))"
export HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"

if [ ! -d "$assets" ]; then
    "$python" scripts/make_quickstart.py --out "$assets" --seed "$seed"
fi

CLUSTER_ARGS=(
    --train-backend fsdp
    --train-device cpu
    --actor-num-nodes 1
    --actor-num-gpus-per-node 2
)

SFT_ARGS=(
    --run-name "$run-sft"
    --hf-checkpoint "$assets/model"
    --save-hf "$assets/warm-start/{rollout_id}"
    --save-interval $sft_rollouts
    --debug-train-only
    --rollout-function-path miles.rollout.sft_rollout.generate_rollout
    --prompt-data "$assets/sft.jsonl"
    --input-key messages
    --loss-type sft_loss
    --disable-compute-advantages-and-returns
    --calculate-per-token-loss
    --num-rollout $sft_rollouts
    --rollout-batch-size 64
    --global-batch-size 64
    --use-dynamic-batch-size
    --max-tokens-per-gpu 4096
    --lr 2e-3
    --lr-warmup-iters 15
    --lr-decay-style constant
    --adam-beta2 0.95
    --weight-decay 0
    --seed "$seed"
)

ROLLOUT_ARGS=(
    --rollout-engine embedded
    --rollout-num-gpus 2
    --embedded-max-running-requests 128
    --prompt-data "$assets/train.jsonl"
    --input-key input
    --label-key label
    --apply-chat-template
    --rm-type reasoning_gym
    --rollout-skip-special-tokens
    --num-rollout 50
    --rollout-batch-size 32
    --n-samples-per-prompt 8
    --rollout-temperature 1
    --rollout-max-response-len 12
    --rollout-seed "$seed"
)

EVAL_ARGS=(
    --eval-interval 25
    --eval-prompt-data held_out "$assets/eval.jsonl"
)

GRPO_ARGS=(
    --advantage-estimator grpo
    --global-batch-size 256
    --use-dynamic-batch-size
    --max-tokens-per-gpu 4096
    --lr 1e-3
    --lr-decay-style constant
    --adam-beta2 0.95
    --weight-decay 0
    --seed "$seed"
)

RL_ARGS=("${CLUSTER_ARGS[@]}" "${ROLLOUT_ARGS[@]}" "${EVAL_ARGS[@]}" "${GRPO_ARGS[@]}")

if [ ! -d "$warm_start" ]; then
    # Mistakes in the flags above should not cost a warm start. The model is the same, only untrained.
    plan=$("$python" train.py --dry-run --hf-checkpoint "$assets/model" --run-name "$run" "${RL_ARGS[@]}" "$@")
    if [[ " $* " == *" --dry-run "* ]]; then
        echo "$plan"
        exit
    fi
    echo "== warm start: supervised fine-tuning on demonstrations of which most are wrong"
    "$python" train.py "${CLUSTER_ARGS[@]}" "${SFT_ARGS[@]}"
fi

echo "== GRPO: reward is the share of letters in their place"
exec "$python" train.py --hf-checkpoint "$warm_start" --run-name "$run" "${RL_ARGS[@]}" "$@"
