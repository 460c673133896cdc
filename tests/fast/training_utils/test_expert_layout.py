"""Which layers have experts, by every way in which configs say it; the type that routes travel in."""

from __future__ import annotations

import numpy as np
import pytest
import transformers

from miles.backends.training_utils.replay.expert_layout import ExpertLayout, routed_rows

CONFIGS = {
    "qwen3_moe": ({"decoder_sparse_step": 2, "mlp_only_layers": [3], "num_hidden_layers": 6}, (1, 5)),
    "qwen2_moe": ({"num_hidden_layers": 3}, (0, 1, 2)),
    "mixtral": ({"num_hidden_layers": 2}, (0, 1)),
    "olmoe": ({"num_hidden_layers": 2}, (0, 1)),
    "glm4_moe": ({"num_hidden_layers": 4, "first_k_dense_replace": 2}, (2, 3)),
    "deepseek_v3": ({"num_hidden_layers": 4, "first_k_dense_replace": 1}, (1, 2, 3)),
}


@pytest.mark.parametrize("kind", CONFIGS)
def test_layers_with_experts_are_those_of_the_model_itself(kind):
    """transformers builds them: the blocks that have a router."""
    import torch

    fields, expected = CONFIGS[kind]
    small = {"hidden_size": 16, "intermediate_size": 16, "num_attention_heads": 2, "vocab_size": 8}
    config = transformers.AutoConfig.for_model(kind, **small, num_key_value_heads=2, **fields)
    layout = ExpertLayout.from_config(config.to_dict())
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    built = tuple(
        i for i, layer in enumerate(model.model.layers) if type(layer.mlp).__name__.endswith(("MoE", "Block"))
    )
    assert layout.moe_layers == built == expected
    assert layout.topk == config.num_experts_per_tok
    assert layout.num_experts == getattr(config, "num_experts", None) or config.num_local_experts


@pytest.mark.parametrize(
    ("experts", "plain", "with_absent"), [(128, "u1", "i1"), (129, "u1", "i2"), (256, "u1", "i2"), (257, "u2", "i2")]
)
def test_the_smallest_type_that_holds_every_number(experts, plain, with_absent):
    layout = ExpertLayout(1, (0,), 2, experts)
    routes = np.array([[[0, experts - 1]], [[-1, -1]]])
    assert layout.compact(routes[:1]).dtype == plain
    compact = layout.compact(routes)
    assert compact.dtype == with_absent and compact.tolist() == routes.tolist()
    assert routed_rows(compact).tolist() == [True, False] and routed_rows(layout.compact(routes[:1])).tolist() == [True]


def test_a_dense_model_has_none():
    assert ExpertLayout.from_config({"num_hidden_layers": 2}) is None
    assert ExpertLayout.from_config({"num_hidden_layers": 2, "num_experts_per_tok": 2, "num_experts": 0}) is None
