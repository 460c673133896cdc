# GRPO on a dense Qwen3 model with FSDP and SGLang, on one node, on mathematics with answers that are compared.
#
# A recipe sets `name` (Qwen3-0.6B), `layout` (colocated: trainer and engines take turns on the same GPUs; disaggregated: half of
# the GPUs for each, one step ahead of each other) and sources this file with its own arguments. They come last, so they win.

python="${MILES_SCRIPT_PYTHON:-python}"
model="${MILES_SCRIPT_MODEL:-models/$name}"
data="${MILES_SCRIPT_DATA:-data/dapo-math-17k.jsonl}"
gpus="${MILES_SCRIPT_GPUS:-8}"
run="${MILES_SCRIPT_RUN_NAME:-${name,,}-fsdp-$layout}"

CLUSTER_ARGS=(
    --train-backend fsdp
    --train-device cuda
    --actor-num-nodes 1
    --num-gpus-per-node "$gpus"
)

if [ "$layout" = colocated ]; then
    driver=train.py
    engine_memory=0.6
    CLUSTER_ARGS+=(--actor-num-gpus-per-node "$gpus" --colocate)
else
    driver=train_async.py
    engine_memory=0.85
    CLUSTER_ARGS+=(--actor-num-gpus-per-node $((gpus / 2)) --rollout-num-gpus $((gpus / 2)))
fi

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
    --sglang-mem-fraction-static "$engine_memory"
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

exec "$python" scripts/launch.py --driver "$driver" -- --run-name "$run" \
    "${CLUSTER_ARGS[@]}" "${CHECKPOINT_ARGS[@]}" "${ROLLOUT_ARGS[@]}" "${SGLANG_ARGS[@]}" "${GRPO_ARGS[@]}" "$@"
