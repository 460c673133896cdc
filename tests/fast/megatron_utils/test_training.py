"""Optimizer steps of the Megatron trainer: beside FSDP's, weight tags, hooks, what is not finite, memory given back."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from miles.backends.training_utils.finite import NonFiniteError
from tests.fast.fsdp_utils import jobs as fsdp
from tests.fast.fsdp_utils.jobs import make_batch
from tests.fast.megatron_utils import jobs
from tests.fast.megatron_utils.jobs import CP, EP, PP, TP
from tests.helpers.gloo_world import World

pytestmark = pytest.mark.nightly

SP, ETP1, DISTRIBUTED = (
    {"sequence_parallel": True},
    {"expert_tensor_parallel_size": 1},
    {"use_distributed_optimizer": True},
)


def make_args(model: str, **fields: Any) -> SimpleNamespace:
    defaults = {"lr": 1e-3, "adam_beta2": 0.95, "use_kl_loss": True, "kl_loss_coef": 0.1, "global_batch_size": 4}
    return fsdp.make_args(model, **defaults | fields)


def without_fillers(metrics: list[list[dict[str, float]]]) -> list[dict[str, float]]:
    """All optimizer steps; fillers depend on the number of data-parallel ranks, and groups of parameters differ."""
    return [
        {k: v for k, v in step.items() if "fillers" not in k and "lr-pg" not in k} for run in metrics for step in run
    ]


@pytest.mark.parametrize(
    "family, layout",
    [
        ("qwen3", {}),
        ("qwen3", {TP: 2, PP: 2, **DISTRIBUTED}),
        ("qwen2", {TP: 2, PP: 2}),  # tied embeddings at both ends of the pipeline
        ("qwen3_moe", {TP: 2, EP: 2, **SP, **ETP1, **DISTRIBUTED}),
        ("qwen3_moe", {CP: 2, PP: 2}),
    ],
    ids=["dp4", "tp2-pp2-distributed", "tied-tp2-pp2", "tp2-ep2-distributed", "moe-cp2-pp2"],
)
def test_the_same_metrics_and_weights_as_fsdp(
    quad: World, unadapted: World, models: dict[str, str], family: str, layout: dict[str, Any]
):
    batches = [make_batch(0), make_batch(1)]
    args = make_args(models[family], **layout)
    ours = quad.run(jobs.train, args, batches, with_ref=True)
    theirs = unadapted.run(fsdp.train, make_args(models[family]), batches, with_ref=True)[0]
    assert all(one["metrics"] == ours[0]["metrics"] for one in ours)
    for a, b in zip(without_fillers(ours[0]["metrics"]), without_fillers(theirs["metrics"]), strict=True):
        assert a == {name: pytest.approx(value, rel=1e-4, abs=1e-5) for name, value in b.items()}
    assert ours[0]["weights"].keys() == theirs["weights"].keys()
    for name, tensor in theirs["weights"].items():
        torch.testing.assert_close(ours[0]["weights"][name], tensor, atol=2e-4, rtol=1e-3)


def test_runs_are_equal_bit_for_bit(quad: World, models: dict[str, str]):
    args = make_args(models["qwen3_moe"], **{TP: 2, EP: 2, **SP, **ETP1, **DISTRIBUTED})
    one, again = (quad.run(jobs.train, args, [make_batch()], with_ref=True)[0] for _ in range(2))
    assert one["metrics"] == again["metrics"]
    assert all(torch.equal(tensor, again["weights"][name]) for name, tensor in one["weights"].items())


def tags(args: SimpleNamespace) -> dict[str, Any]:
    """Log-probs of a sample under each tag, along two rollouts."""
    backend, _ = jobs.make_backend(args, with_ref=True)
    shard = jobs.shard_of(backend, make_batch())

    def under(tag: str) -> torch.Tensor:
        return torch.cat(backend.score(shard, tag))

    jobs.weights_of(backend)  # published
    seen = {"start": under("actor")}
    backend.train(jobs.shard_of(backend, make_batch(), 0))
    seen |= {"old": under("old_actor"), "ref": under("ref"), "actor": under("actor")}
    backend.train(jobs.shard_of(backend, make_batch(), 1))
    seen |= {"moved": under("ref"), "later": under("actor")}
    try:
        under("teacher")
    except ValueError as error:
        seen["refused"] = str(error)
    return seen


def test_weights_are_swapped_by_tag(quad: World, models: dict[str, str]):
    args = make_args(models["qwen3"], keep_old_actor=True, ref_update_interval=2, **{TP: 2, PP: 2, **DISTRIBUTED})
    seen = quad.run(tags, args)[0]
    assert torch.equal(seen["old"], seen["start"]) and torch.equal(seen["ref"], seen["start"])
    assert not torch.equal(seen["actor"], seen["start"])
    assert torch.equal(seen["moved"], seen["later"])
    assert "teacher model was loaded" in seen["refused"]


CALLS: list[Any] = []


def on_init(args: Any) -> None:
    CALLS[:] = ["init"]


def on_log_prob(args: Any, model: list[Any], store_prefix: str) -> None:
    CALLS.append(("log_prob", len(model), store_prefix))


def on_step(args: Any, rollout_id: int, step_id: int, model: Any, optimizer: Any, schedule: Any) -> None:
    CALLS.append(("step", rollout_id, step_id, schedule.num_steps))


def hooked(args: SimpleNamespace) -> list[Any]:
    jobs.train(args, [make_batch()], with_ref=True)
    return list(CALLS)


def test_hooks_are_called_in_order(quad: World, models: dict[str, str]):
    here = f"{__name__}."
    args = make_args(
        models["qwen3"],
        custom_megatron_init_path=here + "on_init",
        custom_megatron_before_log_prob_hook_path=here + "on_log_prob",
        custom_megatron_before_train_step_hook_path=here + "on_step",
    )
    assert quad.run(hooked, args)[0] == [
        "init", ("log_prob", 1, "ref_"), ("log_prob", 1, ""), ("step", 0, 0, 0), ("step", 0, 1, 1),
    ]  # fmt: skip


def broken_step(args: SimpleNamespace) -> Any:
    """A NaN in the weights of one rank; the weights before and after the step."""
    backend, _ = jobs.make_backend(args)
    if torch.distributed.get_rank() == 0:
        next(backend.chunks[0].parameters()).data.fill_(float("nan"))
    before = jobs.weights_of(backend)
    try:
        metrics: Any = backend.train(jobs.shard_of(backend, make_batch()))
    except NonFiniteError as error:
        metrics = str(error)
    after = jobs.weights_of(backend)
    unchanged = all(torch.equal(t.nan_to_num(), after[n].nan_to_num()) for n, t in before.items())
    return metrics, unchanged


@pytest.mark.parametrize("stops", [True, False])
def test_a_step_that_is_not_finite_is_not_taken_on_any_rank(quad: World, models: dict[str, str], stops: bool):
    args = make_args(
        models["qwen3"], use_kl_loss=False, check_for_nan_in_loss_and_grad=stops, **{TP: 2, PP: 2, **DISTRIBUTED}
    )
    for metrics, unchanged in quad.run(broken_step, args):
        assert unchanged
        if stops:
            assert "The step was not taken" in metrics
        else:
            assert [step["train/nonfinite_steps"] for step in metrics] == [1.0, 1.0]


def sleeping(args: SimpleNamespace, sleeps: bool) -> Any:
    backend, _ = jobs.make_backend(args)
    backend.train(jobs.shard_of(backend, make_batch()))
    freed = 0
    if sleeps:
        freed = backend.memory.release()
        assert all(p.untyped_storage().nbytes() == 0 for p in backend.chunks[0].parameters())
        backend.wake()
    metrics = jobs.untimed(backend.train(jobs.shard_of(backend, make_batch(1), 1)))
    return freed, metrics, jobs.weights_of(backend)


def test_memory_that_was_given_back_comes_back_as_it_was(quad: World, models: dict[str, str]):
    args = make_args(models["qwen3_moe"], use_kl_loss=False, **{EP: 2, **ETP1, **DISTRIBUTED})
    freed, metrics, weights = quad.run(sleeping, args, True)[0]
    _, expected, awake = quad.run(sleeping, args, False)[0]
    assert metrics == expected and freed > 2 * sum(t.numel() for t in awake.values())
    assert all(torch.equal(tensor, awake[name]) for name, tensor in weights.items())
