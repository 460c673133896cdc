"""Megatron models say what transformers says, for every architecture, alone and shared by two ranks."""

import pytest
import torch

from tests.fast.megatron_utils.architectures import ARCHITECTURES, make_model
from tests.fast.megatron_utils.weight_jobs import logits, logits_with_gate_and_up_exchanged

TOKENS = torch.randint(0, 300, (2, 96), generator=torch.Generator().manual_seed(0))


@torch.no_grad()
def reference(model):
    return model(TOKENS).logits


# Two ranks without a layout are two replicas.
LAYOUTS = [{"tp": 2}, {}]


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_logits_are_those_of_transformers(pair, tmp_path, name):
    wanted = reference(make_model(tmp_path, name))
    assert wanted.abs().max() > 1  # weights are large enough to show a difference
    for layout in LAYOUTS:
        for answer in pair.run(logits, str(tmp_path), layout, TOKENS):
            assert (answer - wanted).abs().max() < 1e-5, layout


@pytest.mark.parametrize("name", ["qwen3_moe", "deepseek_v3"])
def test_logits_are_the_same_with_experts_on_two_ranks(pair, tmp_path, name):
    wanted = reference(make_model(tmp_path, name))
    for layout in ({"ep": 2}, {"tp": 2, "ep": 2}):
        for answer in pair.run(logits, str(tmp_path), layout, TOKENS):
            assert (answer - wanted).abs().max() < 1e-5, layout


@pytest.mark.parametrize("name", ["qwen3", "deepseek_v3"])
def test_a_table_with_two_tensors_exchanged_is_seen_in_the_logits(pair, tmp_path, name):
    wanted = reference(make_model(tmp_path, name))
    for answer in pair.run(logits_with_gate_and_up_exchanged, str(tmp_path), TOKENS):
        assert (answer - wanted).abs().max() > 1e-2
