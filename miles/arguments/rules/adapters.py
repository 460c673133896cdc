"""LoRA and multi-LoRA."""

from __future__ import annotations

from miles.arguments.args import Args
from miles.arguments.rules.conflict import Clash, excludes, requires
from miles.arguments.rules.rule import Rule, about

FT_TRAINER = Clash("--ft-components train", lambda a: a.use_fault_tolerance and "train" in a.ft_components)


def _many(a: Args) -> bool:
    return a.multi_lora_n_adapters > 0


LORA = about(
    "lora",
    requires(
        "adapters-have-targets",
        "--lora-rank",
        lambda a: a.lora_rank > 0 and a.lora_adapter_path is None,
        Clash("--target-modules", lambda a: a.target_modules),
    ),
    Rule(
        "shared-outer-on-both-sides",
        lambda a: (
            a.sglang_experts_shared_outer_loras is not None
            and a.sglang_experts_shared_outer_loras != a.experts_shared_outer_loras
        ),
        "--experts-shared-outer-loras and --sglang-experts-shared-outer-loras must agree",
    ),
)

MULTI_LORA = about(
    "multi-lora",
    requires(
        "multi-lora-needs",
        "--multi-lora-n-adapters",
        _many,
        Clash("--lora-rank", lambda a: a.lora_rank > 0),
        Clash("--train-backend megatron", lambda a: a.train_backend == "megatron"),
        Clash("--qkv-format thd", lambda a: a.qkv_format == "thd"),
        Clash("--optimizer adam", lambda a: a.optimizer == "adam"),
    ),
    excludes(
        "multi-lora-alone",
        "--multi-lora-n-adapters",
        _many,
        Clash("--pipeline-model-parallel-size", lambda a: a.pipeline_model_parallel_size > 1),
        Clash("--experts-shared-outer-loras", lambda a: a.experts_shared_outer_loras),
        Clash("--colocate", lambda a: a.colocate),
        Clash("--indep-dp", lambda a: a.indep_dp),
        FT_TRAINER,
        Clash("--offload-train", lambda a: a.offload_train),
        Clash("--enable-witness", lambda a: a.enable_witness),
        Clash("--sglang-tokenizer-worker-num", lambda a: (a.sglang_tokenizer_worker_num or 1) > 1),
        Clash("--calculate-per-token-loss", lambda a: a.calculate_per_token_loss),
    ),
)

RULES = (*LORA, *MULTI_LORA)
