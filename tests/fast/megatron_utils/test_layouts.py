"""Every parallel layout computes the same gradient: that of the loss written out, by autograd in fp64."""

from __future__ import annotations

from typing import Any

import pytest

from tests.benchmarks import gradient_invariance as invariance
from tests.fast.megatron_utils.jobs import CP, EP, PP, TP, gradients
from tests.helpers.gloo_world import World

pytestmark = pytest.mark.nightly

RECOMPUTE = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
SP, ETP1 = {"sequence_parallel": True}, {"expert_tensor_parallel_size": 1}
# On four ranks: what is left over is data parallelism.
DENSE = {
    "tp2": {TP: 2},
    "pp2": {PP: 2},
    "cp2": {CP: 2},
    "tp2-pp2": {TP: 2, PP: 2},
    "cp2-pp2": {CP: 2, PP: 2},
    "tp2-sp-cp2": {TP: 2, CP: 2, **SP},
    "pp2-vpp2": {PP: 2, "num_virtual_stages_per_pipeline_rank": 2},
}
MOE = {
    "tp2": {TP: 2, **SP},
    "pp2": {PP: 2},
    "cp2": {CP: 2},
    "ep2": {EP: 2, **ETP1},
    "tp2-pp2": {TP: 2, PP: 2, **SP},
    "tp2-ep2": {TP: 2, EP: 2, **ETP1, **SP},
    "cp2-pp2": {CP: 2, PP: 2},
    "ep2-pp2": {EP: 2, PP: 2, **ETP1},
}
CASES = [("qwen3", name) for name in DENSE] + [("qwen3_moe", name) for name in MOE]


@pytest.fixture(scope="module")
def exact(models: dict[str, str]) -> dict[str, Any]:
    """Gradients by family, from transformers' own forward and the loss written out."""
    batch = invariance.make_batch()
    return {
        family: unfused(invariance.reference_gradients(models[family], batch, dtype="float64", padded=False))
        for family in ("qwen3", "qwen3_deep", "qwen3_moe")
    }


def unfused(named: dict[str, Any]) -> dict[str, Any]:
    """Experts one by one, as checkpoints store them; transformers holds all of a layer in one tensor."""
    out = {}
    for name, tensor in named.items():
        if name.endswith("experts.gate_up_proj"):
            for e, (gate, up) in enumerate(t.chunk(2) for t in tensor):
                stem = name.removesuffix("gate_up_proj")
                out |= {f"{stem}{e}.gate_proj.weight": gate, f"{stem}{e}.up_proj.weight": up}
        elif name.endswith("experts.down_proj"):
            out |= {f"{name.removesuffix('down_proj')}{e}.down_proj.weight": t for e, t in enumerate(tensor)}
        else:
            out[name] = tensor
    return out


@pytest.mark.parametrize("recompute", [False, True], ids=["", "recompute"])
@pytest.mark.parametrize("family, layout", CASES, ids=["-".join(case) for case in CASES])
def test_gradients_are_those_of_the_loss_written_out(
    quad: World, models: dict[str, str], exact: dict[str, Any], family: str, layout: str, recompute: bool
):
    fields = (DENSE if family == "qwen3" else MOE)[layout] | (RECOMPUTE if recompute else {})
    model = models["qwen3_deep"] if "vpp" in layout else models[family]
    args = invariance.make_args(model, micro_batch_size=1 if "pp2" in layout else 2, **fields)
    ours = quad.run(gradients, args, invariance.make_batch())[0]
    wanted = exact["qwen3_deep" if "vpp" in layout else family]
    assert ours.keys() == wanted.keys()
    assert invariance.of_whole(ours, wanted) < 1e-6


def test_padded_rows_give_the_same_gradients_too(quad: World, models: dict[str, str], exact: dict[str, Any]):
    args = invariance.make_args(models["qwen3"], qkv_format="bshd", micro_batch_size=2, **{TP: 2, CP: 2, **SP})
    assert invariance.of_whole(quad.run(gradients, args, invariance.make_batch())[0], exact["qwen3"]) < 1e-6
