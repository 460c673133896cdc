"""Layouts that Megatron cannot run are refused before anything starts, each with what to change."""

from __future__ import annotations

import pytest

from miles.arguments.plan.sections import trainer
from tests.fast.arguments.conftest import write_model

MEGATRON = {"train_backend": "megatron", "actor_num_gpus_per_node": 4}
EXPERTS = {"model_type": "qwen3_moe", "num_experts": 8, "moe_intermediate_size": 16}
TP, PP, CP, EP = (f"{axis}_parallel_size" for axis in ("tensor_model", "pipeline_model", "context", "expert_model"))


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({TP: 2, CP: 4}, ["= 8 does not divide the 4 trainer ranks"]),
        ({EP: 2}, ["--expert-model-parallel-size 2: the model has no experts"]),
        ({"num_virtual_stages_per_pipeline_rank": 2}, ["have no effect with --pipeline-model-parallel-size 1"]),
        ({"recompute_granularity": "full"}, ["needs --recompute-method"]),
        ({"moe_token_dispatcher_type": "flex"}, ["needs DeepEP"]),
    ],
)
def test_what_does_not_divide_is_named(changes, said, problems):
    found = "\n".join(problems(**MEGATRON | changes))
    assert all(text in found for text in said), found


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({TP: 2}, "needs --sequence-parallel"),
        ({TP: 2, "sequence_parallel": True, "expert_tensor_parallel_size": 1}, "would not add up the gradients"),
        ({TP: 2, EP: 2, "sequence_parallel": True}, "gloo cannot: set --expert-tensor-parallel-size 1"),
        ({EP: 8, "expert_tensor_parallel_size": 1}, "= 8 does not divide the 4 trainer ranks"),
    ],
)
def test_layouts_of_experts(changes, said, problems, tmp_path):
    model = write_model(tmp_path / "moe", **EXPERTS)
    found = problems(**MEGATRON | {"hf_checkpoint": str(model)} | changes)
    assert any(said in p for p in found), found


def test_layouts_that_work_are_accepted_and_planned(make, tmp_path):
    args = make(**MEGATRON, **{TP: 2, PP: 2, "sequence_parallel": True, "use_distributed_optimizer": True})
    assert trainer(args)["layout"] == (
        "tensor 2 with sequence parallelism, pipeline 2, context 1, data 1 with a distributed optimizer"
    )
    model = write_model(tmp_path / "moe", **EXPERTS)
    fields = {TP: 2, EP: 2, "expert_tensor_parallel_size": 1, "sequence_parallel": True}
    args = make(hf_checkpoint=str(model), **MEGATRON, **fields)
    assert trainer(args)["layout"].endswith("data 2, experts over 2, each cut into 1")


def test_megatron_core_must_be_there(problems, monkeypatch):
    monkeypatch.setattr("miles.arguments.rules.megatron_layout.has_package", lambda name: False)
    (problem,) = problems(**MEGATRON)
    assert "needs megatron-core, which is not installed: pip install 'miles[megatron]'" in problem


def test_flags_of_fsdp_have_no_effect(problems):
    assert any("--dp-replicate-size" in p for p in problems(**MEGATRON, dp_replicate_size=2))
