"""Launch commands as public users write them must parse: every flag, with as many values as they give it.

Whether a command can run here is another matter: rules may refuse what a system that is not built would need.
"""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest

from miles.arguments import ArgumentsError
from miles.arguments.args import ALL_FLAGS
from miles.arguments.parse import read_command_line
from miles.arguments.parser import FlagParser

DENSE_FSDP = """
--train-backend fsdp --hf-checkpoint /models/Qwen3-0.6B --ref-load /models/Qwen3-0.6B
--prompt-data /data/dapo-math-17k.jsonl --input-key prompt --label-key label --apply-chat-template --rollout-shuffle
--rm-type deepscaler --num-rollout 3000 --rollout-batch-size 32 --n-samples-per-prompt 8
--rollout-max-response-len 8192 --rollout-temperature 0.8 --global-batch-size 256
--use-dynamic-batch-size --max-tokens-per-gpu 9216 --balance-data
--eval-interval 20 --eval-prompt-data aime /data/aime-2024.jsonl --n-samples-per-eval-prompt 16
--eval-max-response-len 16384 --eval-top-p 0.7
--advantage-estimator grpo --use-kl-loss --kl-loss-coef 0.00 --kl-loss-type low_var_kl --kl-coef 0.00
--entropy-coef 0.00 --eps-clip 0.2 --eps-clip-high 0.28
--optimizer adam --lr 1e-6 --lr-decay-style constant --weight-decay 0.1 --adam-beta1 0.9 --adam-beta2 0.98
--gradient-checkpointing --attn-implementation flash_attention_3 --update-weight-buffer-size 536870912
--train-env-vars '{"PYTORCH_CUDA_ALLOC_CONF":"expandable_segments:True"}'
--rollout-num-gpus-per-engine 1 --sglang-mem-fraction-static 0.6 --sglang-decode-log-interval 1000
--sglang-chunked-prefill-size 4096 --actor-num-nodes 1 --actor-num-gpus-per-node 8 --num-gpus-per-node 8 --colocate
--use-wandb --wandb-project miles --wandb-group qwen3-0.6b-fsdp --wandb-key '' --disable-wandb-random-suffix
"""

MOE_MEGATRON = """
--spec miles_plugins.models.glm4 get_glm_spec --num-layers 61 --hidden-size 7168 --ffn-hidden-size 18432
--num-attention-heads 128 --kv-channels 128 --vocab-size 129280 --make-vocab-size-divisible-by 1
--moe-layer-freq '[0]*3+[1]*58' --num-experts 256 --moe-ffn-hidden-size 2048 --moe-router-topk 8
--moe-shared-expert-intermediate-size 2048 --moe-router-pre-softmax --moe-router-score-function sigmoid
--moe-router-enable-expert-bias --moe-router-load-balancing-type seq_aux_loss --moe-token-dispatcher-type alltoall
--moe-aux-loss-coeff 0 --moe-router-bias-update-rate 0 --moe-router-group-topk 4 --moe-router-num-groups 8
--moe-grouped-gemm --moe-router-topk-scaling-factor 2.5 --moe-router-dtype fp32 --moe-permute-fusion
--multi-latent-attention --q-lora-rank 1536 --kv-lora-rank 512 --qk-head-dim 128 --qk-pos-emb-head-dim 64 --v-head-dim 128
--qk-layernorm --rotary-base 10000 --rotary-scaling-factor 40 --mscale 1.0 --mscale-all-dim 1.0 --beta-fast 32 --beta-slow 1
--rope-type yarn --original-max-position-embeddings 4096 --no-rope-fusion --disable-bias-linear --swiglu
--untie-embeddings-and-output-weights --normalization RMSNorm --norm-epsilon 1e-6 --position-embedding-type rope
--tensor-model-parallel-size 8 --sequence-parallel --pipeline-model-parallel-size 4 --context-parallel-size 4
--expert-model-parallel-size 32 --expert-tensor-parallel-size 1 --decoder-last-pipeline-num-layers 13
--recompute-granularity full --recompute-method uniform --recompute-num-layers 1
--attention-dropout 0.0 --hidden-dropout 0.0 --accumulate-allreduce-grads-in-fp32 --attention-softmax-in-fp32
--attention-backend auto --moe-enable-deepep --optimizer-cpu-offload --overlap-cpu-optimizer-d2h-h2d
--use-precision-aware-optimizer --use-tis --tis-clip 2.0 --tis-clip-low 0 --use-rollout-routing-replay
--actor-num-nodes 16 --actor-num-gpus-per-node 8 --colocate --rollout-num-gpus-per-engine 64
--rollout-stop-token-ids 151329 151336 151338 --over-sampling-batch-size 256 --dynamic-sampling-filter-path my.filter.fn
--sglang-enable-dp-attention --sglang-dp-size 8 --sglang-ep-size 64 --sglang-moe-dense-tp-size 1 --sglang-enable-dp-lm-head
--sglang-cuda-graph-bs 1 2 4 8 16 24 32 40 48 56 64 --sglang-moe-a2a-backend deepep --sglang-deepep-mode auto
--sglang-server-concurrency 1024 --sglang-speculative-algorithm EAGLE --sglang-speculative-num-steps 2
--sglang-speculative-eagle-topk 1 --sglang-speculative-num-draft-tokens 3 --sglang-kv-cache-dtype fp8_e4m3
--sglang-nsa-decode-backend flashmla_kv --sglang-watchdog-timeout 3600 --router-health-check-interval-secs 15
--update-weight-transfer-mode p2p --use-fault-tolerance --dump-details /tmp/dump --rollout-batch-size 128
"""

AGENTIC_ASYNC = """
--fully-async --pause-generation-mode in_place --async-max-concurrent-samples 128 --max-weight-staleness 4
--rollout-submission-granularity sample --custom-generate-function-path miles.rollout.generate_hub.agentic_tool_call.generate
--custom-agent-function-path my.agent.run --custom-rm-path my.reward.fn --max-seq-len 65536
--use-session-server v2 --session-server-port 5000 5008 --tito-model glm47 --sglang-tool-call-parser glm47
--sglang-reasoning-parser glm45 --stream-optimizer-state-to-disk --stream-optimizer-state-moment-dtype bf16
--offload-train-target disk --offload-train-disk-dir /scratch/x --no-offload-rollout --eval-num-gpus 8
--eval-sglang-mem-fraction-static 0.7 --no-eval-sglang-disable-radix-cache --use-miles-dashboard
--rollout-batch-size 8 --n-samples-per-prompt 8 --lora-rank 32 --lora-alpha 32 --target-modules all-linear
--multi-lora-adapter a a.yaml --multi-lora-adapter b b.yaml --opd-teacher-urls math=http://a:1 code=http://b:2
"""


@pytest.mark.parametrize("command", [DENSE_FSDP, MOE_MEGATRON, AGENTIC_ASYNC])
def test_public_commands_parse(command):
    argv = shlex.split(command)
    args = read_command_line(argv)
    assert len(args.given) == len({w.split("=")[0] for w in argv if w.startswith("--")})


def test_values_arrive_where_they_belong():
    args = read_command_line(shlex.split(MOE_MEGATRON))
    assert args.spec == ["miles_plugins.models.glm4", "get_glm_spec"]
    assert args.moe_layer_freq == "[0]*3+[1]*58"
    assert args.rollout_stop_token_ids == [151329, 151336, 151338]
    assert args.sglang_cuda_graph_bs_decode[:3] == [1, 2, 4]
    assert args.sglang_enable_dp_attention is True
    assert args.sglang_disable_radix_cache is None, "what is not given is left to the engine"
    assert args.router_health_check_interval_secs == 15
    agentic = read_command_line(shlex.split(AGENTIC_ASYNC))
    assert agentic.session_server_port == [5000, 5008]
    assert agentic.eval_sglang_disable_radix_cache is False


def _recorded() -> list[tuple[str, int]]:
    lines = Path(__file__).with_name("launch_flags.txt").read_text().splitlines()
    return [(flag, int(count)) for flag, *counts in map(str.split, lines) for count in counts]


def test_flags_of_recorded_launches_take_as_many_values():
    """Each flag of 50 public launch commands, with each number of values that it was given."""
    parser, wrong = FlagParser(ALL_FLAGS.values()), []
    for flag, count in _recorded():
        try:
            _, unknown = parser.parse_known_args([flag, *["1"] * count])
        except ArgumentsError as error:
            wrong.append(f"{flag} with {count} values: {error}")
            continue
        if unknown:
            wrong.append(f"{flag} with {count} values: {unknown} left over")
    assert wrong == []
