"""Tiny models of every architecture that the Megatron trainer knows, with weights that no mistake leaves unnoticed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

DENSE = {
    "vocab_size": 320,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 512,
    "pad_token_id": 0,
}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
SIGMOID = {
    "n_routed_experts": 8,
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 16,
    "n_shared_experts": 2,
    "routed_scaling_factor": 1.7,
    "norm_topk_prob": True,
    "rms_norm_eps": 1e-6,
}
LATENT = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 16,
    "q_lora_rank": 24,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 12,
}
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 8.0, "original_max_position_embeddings": 64}
DEEPSEEK = {k: v for k, v in DENSE.items() if k != "head_dim"} | SIGMOID | LATENT
LLAMA3 = YARN | {"rope_type": "llama3", "rope_theta": 500.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}

# name: (class of the config, its fields)
ARCHITECTURES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", DENSE),
    "llama3": ("LlamaConfig", DENSE | {"rope_parameters": LLAMA3}),
    "qwen2": ("Qwen2Config", {k: v for k, v in DENSE.items() if k != "head_dim"} | {"tie_word_embeddings": True}),
    "qwen3": ("Qwen3Config", DENSE),
    "qwen3_odd_vocabulary": ("Qwen3Config", DENSE | {"vocab_size": 313}),
    "qwen3_one_group": ("Qwen3Config", DENSE | {"num_key_value_heads": 1}),
    "qwen3_yarn": ("Qwen3Config", DENSE | {"rope_parameters": YARN}),
    "qwen3_moe": ("Qwen3MoeConfig", DENSE | EXPERTS | {"norm_topk_prob": True}),
    "qwen3_moe_mixed": ("Qwen3MoeConfig", DENSE | EXPERTS | {"norm_topk_prob": False, "mlp_only_layers": [1]}),
    "deepseek_v3": ("DeepseekV3Config", DEEPSEEK | {"n_group": 4, "topk_group": 2, "first_k_dense_replace": 1}),
    "deepseek_v3_yarn": (
        "DeepseekV3Config",
        DEEPSEEK
        | {"n_group": 1, "topk_group": 1, "q_lora_rank": None, "first_k_dense_replace": 0}
        | {"rope_parameters": YARN | {"mscale": 0.8, "mscale_all_dim": 1.2}},
    ),
    "glm4_moe": (
        "Glm4MoeConfig",
        DENSE | SIGMOID | {"first_k_dense_replace": 1, "use_qk_norm": True, "attention_bias": True},
    ),
    "glm4_moe_lite": ("Glm4MoeLiteConfig", DEEPSEEK),
}


def make_model(directory: Path, name: str, **save: Any) -> Any:
    """Write a model of `ARCHITECTURES` and return it, for the answers of transformers. `save`: of save_pretrained."""
    import torch
    import transformers

    kind, fields = ARCHITECTURES[name]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(5)
        config = getattr(transformers, kind)(**fields)
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
        tensors = [*model.named_parameters(), *model.named_buffers()]
        with torch.no_grad():
            for tensor_name, tensor in tensors:
                if "norm" in tensor_name:
                    tensor.add_(torch.randn_like(tensor) * 0.2)
                elif "bias" in tensor_name:
                    tensor.copy_(torch.randn_like(tensor) * 0.2)
                elif tensor.dim() > 1:
                    tensor.mul_(4)
        model.save_pretrained(directory, **save)
    return model
