import pytest
import torch

from miles.backends.training_utils.finite import NonFiniteError, check_step_is_finite, nonfinite_samples
from tests.fast.training_utils.toy import make_args

GOOD = {"train/loss": 0.5, "train/nonfinite_tokens": 0.0}
CASES = [
    ({**GOOD, "train/loss": float("nan")}, 1.0, "the loss is nan"),
    (GOOD, float("inf"), "the gradient norm is inf"),
    ({**GOOD, "train/nonfinite_tokens": 3.0}, 1.0, "3 trained tokens"),
]


def test_a_finite_step_passes():
    metrics = dict(GOOD)
    assert check_step_is_finite(make_args(), metrics, 1.0, rollout_id=0, step=0)
    assert metrics["train/nonfinite_steps"] == 0.0


@pytest.mark.parametrize(("metrics", "grad_norm", "message"), CASES)
def test_a_step_that_is_not_finite_stops_the_run(metrics, grad_norm, message):
    with pytest.raises(NonFiniteError, match=f"rollout 7, optimizer step 2: .*{message}"):
        check_step_is_finite(make_args(), dict(metrics), grad_norm, rollout_id=7, step=2)


@pytest.mark.parametrize(("metrics", "grad_norm", "message"), CASES)
def test_or_is_skipped_and_counted_where_the_flag_says_so(metrics, grad_norm, message):
    metrics = dict(metrics)
    args = make_args(check_for_nan_in_loss_and_grad=False)
    assert not check_step_is_finite(args, metrics, grad_norm, rollout_id=7, step=2)
    assert metrics["train/nonfinite_steps"] == 1.0


def test_samples_are_named_for_what_trains_and_not_for_what_is_masked():
    nan = float("nan")
    columns = dict(
        sample_indices=[40, 41, 42, 43],
        loss_masks=[[1, 0], [1, 1], [1, 1], [1, 1]],
        log_probs=[[0.0, nan], [0.0, nan], [0.0, 0.0], [0.0, 0.0]],
        rollout_log_probs=None,
        advantages=[[1.0, 1.0], [nan, 0.0], [1.0, 1.0], [1.0, 1.0]],
    )
    current = {2: torch.tensor([float("-inf"), 0.0])}
    assert nonfinite_samples(columns, [0, 1, 2], current) == [
        "sample 41 (log_probs, advantages)",
        "sample 42 (log_probs of the training pass)",
    ]


def test_a_long_list_of_samples_is_cut():
    with pytest.raises(NonFiniteError, match="sample 9; sample 9 and 3 more"):
        check_step_is_finite(
            make_args(), {"train/loss": float("nan")}, 1.0, rollout_id=0, step=0, suspects=lambda: ["sample 9"] * 13
        )
