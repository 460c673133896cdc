import pytest
import torch

from miles.backends.training_utils.columns import MicroBatch
from miles.backends.training_utils.loss_hub.custom_loss import custom_objective
from miles.backends.training_utils.loss_hub.sft_loss import sft_objective
from miles.utils.imports import register_function
from tests.fast.training_utils.example import (
    MASKS,
    NAN,
    TOTALS,
    columns,
    evaluate,
    slow_reduce,
    slow_token_losses,
)
from tests.fast.training_utils.toy import make_args


def test_sft_loss_written_out_and_masked_nan_harmless():
    args = make_args(loss_type="sft_loss")
    batch = MicroBatch.from_columns(args, columns(), range(3))
    leaf = torch.tensor([-1.0, NAN, -2.0, -0.7, -3.0, -1.1], requires_grad=True)
    objective = sft_objective(args, batch, leaf, TOTALS)
    assert objective.loss.item() == pytest.approx(slow_reduce(args, [[1.0, 0.0, 2.0], [0.7, 3.0], [1.1]]))
    (grad,) = torch.autograd.grad(objective.loss, leaf)
    assert grad.tolist() == pytest.approx([-1 / 8, 0, -1 / 8, -1 / 8, -1 / 8, -1 / 2])


def test_custom_loss_gets_columns_logits_and_the_reducer():
    def loss(args, batch, logits, sum_of_sample_mean):
        assert batch["response_lengths"] == [3, 2, 1] and batch["advantages"][1].tolist() == [-2.0, -2.0]
        assert [len(t) for t in batch["unconcat_tokens"]] == batch["total_lengths"]
        value = sum_of_sample_mean(logits.flatten()[:6])
        return value, {"mine": value.detach()}

    register_function("tests.custom_loss", loss)
    args = make_args(loss_type="custom_loss", custom_loss_function_path="tests.custom_loss")
    logits = torch.ones(1, 6, 1, requires_grad=True)
    objective = custom_objective(args, MicroBatch.from_columns(args, columns(), range(3)), logits, TOTALS)
    want = slow_reduce(args, [[1.0] * 3, [1.0] * 2, [1.0]])
    assert objective.loss.item() == pytest.approx(want)
    metrics = objective.metrics.reduce()
    assert metrics["train/loss"] == metrics["train/mine"] == pytest.approx(want)
    gap = evaluate(make_args())[2]
    assert {k: v for k, v in metrics.items() if k not in ("train/loss", "train/mine")} == {
        k: v for k, v in gap.items() if k.startswith(("contract/", "train/train_rollout", "train/mismatch_ratio"))
    }, "the gap to the engine is measured whatever the loss computes"


def test_custom_loss_without_a_path_names_the_flag():
    args = make_args(loss_type="custom_loss", custom_loss_function_path=None)
    with pytest.raises(ValueError, match="--custom-loss-function-path"):
        custom_objective(args, MicroBatch.from_columns(args, columns(), range(3)), torch.ones(1, 6, 1), TOTALS)


# ---- Dr. GRPO --------------------------------------------------------------------------------------------------------

DR_GRPO = "miles.backends.training_utils.loss_hub.dr_grpo.constant_denominator"


def test_dr_grpo_weighs_tokens_alike_whatever_their_responses_length():
    args = make_args(custom_pg_loss_reducer_function_path=DR_GRPO)
    loss, grad, _ = evaluate(args)
    losses, _ = slow_token_losses(args)
    total = sum(x * m for xs, ms in zip(losses, MASKS, strict=True) for x, m in zip(xs, ms, strict=True))
    assert loss == pytest.approx(total / 1000 / 2, rel=1e-5)
    assert grad[1] == 0, "masked"


def test_dr_grpo_keeps_other_terms_as_they_are():
    """The hook is of the policy-gradient term alone: entropy and KL stay means."""
    args = make_args(
        custom_pg_loss_reducer_function_path=DR_GRPO, use_kl_loss=True, kl_loss_coef=0.5, kl_loss_type="k2"
    )
    loss, _, metrics = evaluate(args)
    plain = evaluate(make_args(use_kl_loss=True, kl_loss_coef=0.5, kl_loss_type="k2"))[2]
    assert metrics["train/kl_loss"] == plain["train/kl_loss"]
    assert loss == pytest.approx(metrics["train/pg_loss"] + 0.5 * metrics["train/kl_loss"])


def test_dr_grpo_refuses_a_second_denominator():
    with pytest.raises(ValueError, match="drop --calculate-per-token-loss"):
        evaluate(make_args(custom_pg_loss_reducer_function_path=DR_GRPO, calculate_per_token_loss=True))
