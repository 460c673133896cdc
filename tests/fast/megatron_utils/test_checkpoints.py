"""Checkpoints: saved in one layout, loaded in another, and the run goes on as if nothing had happened."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from miles.backends.training_utils.checkpoint import CheckpointError
from tests.fast.fsdp_utils import jobs as fsdp
from tests.fast.fsdp_utils.jobs import make_batch
from tests.fast.megatron_utils import jobs
from tests.fast.megatron_utils.jobs import CP, EP, PP, TP
from tests.fast.megatron_utils.test_training import DISTRIBUTED, ETP1, SP, make_args
from tests.helpers.gloo_world import World

pytestmark = pytest.mark.nightly

BATCHES = [make_batch(0), make_batch(1), make_batch(2)]


@pytest.mark.parametrize(
    "family, saved, loaded",
    [
        ("qwen3", {TP: 2, PP: 2, **DISTRIBUTED}, {TP: 2, PP: 2, **DISTRIBUTED}),
        ("qwen3", {TP: 2, **DISTRIBUTED}, {PP: 2, CP: 2, **DISTRIBUTED}),
        ("qwen3", {PP: 2}, {TP: 2, **SP}),
        ("qwen3_moe", {EP: 2, **ETP1, **DISTRIBUTED}, {TP: 2, EP: 2, **SP, **ETP1, **DISTRIBUTED}),
        ("qwen3_moe", {PP: 2, **DISTRIBUTED}, {CP: 2, **DISTRIBUTED}),
    ],
    ids=["same", "tp2-to-pp2cp2", "pp2-to-tp2", "ep2-to-tp2ep2", "pp2-to-cp2"],
)
def test_a_run_goes_on_in_another_layout(
    quad: World, models: dict[str, str], tmp_path: Path, family: str, saved: dict[str, Any], loaded: dict[str, Any]
):
    root = str(tmp_path / "save")
    args = make_args(models[family], ref_update_interval=1, **saved)
    before = quad.run(jobs.train_and_save, args, BATCHES, root, with_ref=True)[0]
    args = make_args(models[family], ref_update_interval=1, load=root, **loaded)
    after = quad.run(jobs.load_and_train, args, BATCHES[-1], with_ref=True)[0]
    assert after["start"] == before["start"] == 2
    exact = saved == loaded
    for a, b in zip(after["log_probs"], before["log_probs"], strict=True):
        torch.testing.assert_close(a, b, atol=0.0 if exact else 1e-5, rtol=0.0)
    (ours,), (theirs,) = ([run["metrics"]] for run in (after, before))
    if exact:
        assert ours == theirs
        assert all(torch.equal(tensor, before["weights"][name]) for name, tensor in after["weights"].items())
        return
    for name, tensor in before["weights"].items():  # moments and their step count came along
        torch.testing.assert_close(after["weights"][name], tensor, atol=1e-4, rtol=1e-3)
    assert ours[0]["train/kl_loss"] == pytest.approx(theirs[0]["train/kl_loss"], abs=1e-6)


def refused(args: SimpleNamespace, **kwargs: Any) -> str:
    try:
        jobs.make_backend(args, **kwargs)
    except CheckpointError as error:
        return str(error)
    return "loaded"


def save_first(args: SimpleNamespace, root: str) -> None:
    backend, _ = jobs.make_backend(args)
    jobs.save(backend, root, 0)


def fsdp_refused(args: SimpleNamespace) -> str:
    try:
        fsdp.make_backend(args)
    except CheckpointError as error:
        return str(error)
    return "loaded"


def test_what_cannot_be_loaded_is_refused_by_name(
    quad: World, unadapted: World, models: dict[str, str], tmp_path: Path
):
    root = str(tmp_path / "save")
    moe = models["qwen3_moe"]
    quad.run(save_first, make_args(moe, **{EP: 2, **ETP1, **DISTRIBUTED}), root)
    other = quad.run(refused, make_args(models["qwen3"], load=root))[0]
    assert "is a checkpoint of another model" in other and "model_type is qwen3 here and qwen3_moe" in other
    unshared = quad.run(refused, make_args(moe, load=root, **DISTRIBUTED))[0]
    assert "DistributedOptimizer + DistributedOptimizer" in unshared and "--no-load-optim" in unshared
    assert quad.run(refused, make_args(moe, load=root, no_load_optim=True))[0] == "loaded"
    assert "was written by the megatron trainer" in unadapted.run(fsdp_refused, make_args(moe, load=root))[0]
    theirs = str(tmp_path / "fsdp")
    unadapted.run(fsdp.train_and_save, make_args(moe, use_kl_loss=False), [make_batch()], theirs, 0)
    assert "was written by the FSDP trainer" in quad.run(refused, make_args(moe, load=theirs))[0]
