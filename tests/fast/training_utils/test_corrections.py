import math

import pytest
import torch

from miles.utils.imports import register_function
from tests.fast.training_utils.example import (
    LOG_PROBS,
    OLD,
    ROLLOUT,
    columns,
    evaluate,
    slow_reduce,
    slow_token_losses,
)
from tests.fast.training_utils.toy import make_args

ICEPOP = "miles.backends.training_utils.loss_hub.corrections.icepop_function"


@pytest.mark.parametrize("path", [None, ICEPOP])
def test_corrections_written_out(path):
    args = make_args(use_tis=True, tis_clip=1.05, tis_clip_low=0.85, custom_tis_function_path=path)
    loss, _, metrics = evaluate(args)
    losses, _ = slow_token_losses(args)
    raw = [[math.exp(a - b) for a, b in zip(p, q, strict=True)] for p, q in zip(OLD, ROLLOUT, strict=True)]
    if path is None:
        weights = [[min(max(x, 0.85), 1.05) for x in xs] for xs in raw]
    else:
        weights = [[x if 0.85 <= x <= 1.05 else 0.0 for x in xs] for xs in raw]
    weighted = [[a * w for a, w in zip(x, ws, strict=True)] for x, ws in zip(losses, weights, strict=True)]
    assert loss == pytest.approx(slow_reduce(args, weighted), rel=1e-5)
    assert metrics["train/tis"] == pytest.approx(slow_reduce(args, raw), rel=1e-5)
    cut = [[float(abs(a - b) > 1e-9) for a, b in zip(x, y, strict=True)] for x, y in zip(raw, weights, strict=True)]
    assert metrics["train/tis_clipfrac"] == pytest.approx(slow_reduce(args, cut), rel=1e-5)
    assert metrics["train/tis_abs"] == pytest.approx(
        slow_reduce(args, [[abs(x - 1) for x in xs] for xs in raw]), rel=1e-5
    )
    ois = [[math.exp(a - b) for a, b in zip(p, q, strict=True)] for p, q in zip(LOG_PROBS, OLD, strict=True)]
    assert metrics["train/ois"] == pytest.approx(slow_reduce(args, ois), rel=1e-5)


def test_rejected_tokens_leave_the_numerator_and_stay_in_denominator_and_metrics():
    def reject(
        args, *, pg_loss, train_log_probs, rollout_log_probs, loss_masks, total_lengths, response_lengths, **kwargs
    ):
        assert [len(x) for x in train_log_probs] == response_lengths == [3, 2, 1] and total_lengths == [5, 4, 3]
        masks = [m.clone() for m in loss_masks]
        masks[0][0] = 0
        return pg_loss, masks, {"seen": torch.ones(6)}

    register_function("tests.reject", reject)
    args = make_args(use_tis=True, custom_tis_function_path="tests.reject")
    loss, _, metrics = evaluate(args)
    losses, _ = slow_token_losses(args)
    assert loss == pytest.approx(slow_reduce(args, losses, masks=[[0, 0, 1], [1, 1], [1]]), rel=1e-5)
    assert metrics["train/seen"] == pytest.approx(slow_reduce(args, [[1] * 3, [1] * 2, [1]])), "counts rejected tokens"


def test_mismatch_metrics_alone_leave_the_loss_as_it_is():
    def double(args, *, pg_loss, loss_masks, **kwargs):
        return 2 * pg_loss, [torch.zeros_like(m) for m in loss_masks], {"tis": torch.ones(6)}

    register_function("tests.double", double)
    plain = evaluate(make_args())
    watched = evaluate(make_args(get_mismatch_metrics=True, custom_tis_function_path="tests.double"))
    assert watched[0] == plain[0] and torch.equal(watched[1], plain[1])
    assert "train/tis" in watched[2] and "train/tis" not in plain[2]


def test_a_hook_may_take_everything_by_keyword_and_sees_whole_responses():
    def hook(**kwargs):
        assert set(kwargs) == {"args", "pg_loss", "train_log_probs", "rollout_log_probs", "loss_masks"} | {
            "total_lengths",
            "response_lengths",
            "parallel_state",
            "max_seq_lens",
        }
        assert kwargs["parallel_state"].cp.size == 1
        return kwargs["pg_loss"], kwargs["loss_masks"], {}

    register_function("tests.hook", hook)
    evaluate(make_args(use_tis=True, custom_tis_function_path="tests.hook"))


def test_masks_of_another_length_are_refused():
    def short(args, *, pg_loss, loss_masks, **kwargs):
        return pg_loss, [m[:1] for m in loss_masks], {}

    register_function("tests.short", short)
    with pytest.raises(ValueError, match=r"tests.short returned loss masks of \[1, 1, 1\] tokens"):
        evaluate(make_args(use_tis=True, custom_tis_function_path="tests.short"))


@pytest.mark.parametrize(("column", "side"), [("rollout_log_probs", "engine's")])
def test_a_correction_without_both_sides_is_an_error(column, side):
    with pytest.raises(ValueError, match=side):
        evaluate(make_args(use_tis=True), columns_=columns(**{column: None}))


def test_a_custom_correction_may_run_without_trainer_scored_log_probs():
    seen = {}

    def look(args, *, pg_loss, train_log_probs, loss_masks, **kwargs):
        seen["train"] = train_log_probs
        return pg_loss, loss_masks, {}

    register_function("tests.look", look)
    args = make_args(
        use_tis=False, use_rollout_logprobs=True, get_mismatch_metrics=True, custom_tis_function_path="tests.look"
    )
    evaluate(args, columns_=columns(log_probs=None))
    assert seen["train"] is None
