import math

import pytest

from tests.fast.training_utils.example import (
    MASKS,
    OLD,
    ROLLOUT,
    columns,
    evaluate,
    slow_reduce,
    slow_token_losses,
)
from tests.fast.training_utils.toy import make_args


def test_mismatch_is_measured_against_the_trainers_own_score_whatever_the_loss_uses():
    args = make_args(use_rollout_logprobs=True)
    loss, _, metrics = evaluate(args)
    losses, _ = slow_token_losses(args, old=ROLLOUT)
    assert loss == pytest.approx(slow_reduce(args, losses), rel=1e-5), "the loss starts from the engine's"
    gaps = [[abs(a - b) for a, b in zip(p, q, strict=True)] for p, q in zip(OLD, ROLLOUT, strict=True)]
    assert metrics["train/train_rollout_logprob_abs_diff"] == pytest.approx(slow_reduce(args, gaps), rel=1e-4)
    trained = [g for gs, ms in zip(gaps, MASKS, strict=True) for g, m in zip(gs, ms, strict=True) if m]
    assert metrics["train/train_rollout_logprob_abs_diff_max"] == pytest.approx(max(trained), rel=1e-4)
    kl = [[math.exp(t - r) - 1 + r - t for t, r in zip(p, q, strict=True)] for p, q in zip(OLD, ROLLOUT, strict=True)]
    assert metrics["train/train_rollout_kl"] == pytest.approx(slow_reduce(args, kl), rel=1e-3)


def test_the_distribution_of_the_ratio_is_reported_whatever_corrects_it():
    metrics = evaluate(make_args())[2]
    ratios = [
        math.exp(p - q)
        for ps, qs, ms in zip(OLD, ROLLOUT, MASKS, strict=True)
        for p, q, m in zip(ps, qs, ms, strict=True)
        if m
    ]
    assert metrics["train/mismatch_ratio/max"] == pytest.approx(max(ratios), rel=1e-5)
    assert metrics["train/mismatch_ratio/mean"] == pytest.approx(sum(ratios) / 5, rel=1e-5)
    assert metrics["train/mismatch_ratio/abs"] == pytest.approx(sum(abs(r - 1) for r in ratios) / 5, rel=1e-5)
    want = sum(ratios) ** 2 / (5 * sum(r * r for r in ratios))
    assert metrics["train/mismatch_ratio/ess"] == pytest.approx(want, rel=1e-5)
    assert metrics["train/mismatch_ratio/p50"] == pytest.approx(sorted(ratios)[2], rel=0.02)
    assert metrics["train/mismatch_ratio/p99"] == pytest.approx(max(ratios), rel=0.02)
    bare = evaluate(make_args(), columns_=columns(rollout_log_probs=None))[2]
    assert not any("mismatch" in name for name in bare), "nothing to compare with"


def test_exact_ratio_counts_tokens_that_agree_bit_for_bit():
    exact = columns(log_probs=ROLLOUT)
    assert evaluate(make_args(), columns_=exact)[2]["contract/logprob_exact_ratio"] == 1.0
    almost = [[*ROLLOUT[0][:2], ROLLOUT[0][2] + 1e-6], *ROLLOUT[1:]]
    assert evaluate(make_args(), columns_=columns(log_probs=almost))[2]["contract/logprob_exact_ratio"] == 4 / 5
    bare = evaluate(make_args(), columns_=columns(rollout_log_probs=None))[2]
    assert "contract/logprob_exact_ratio" not in bare


def test_version_coverage_counts_trained_tokens_with_a_version():
    spans = [[(3, 0, 2)], [(3, 0, 1), (4, 1, 2)], []]
    metrics = evaluate(make_args(), columns_=columns(version_spans=spans))[2]
    assert metrics["contract/version_coverage"] == pytest.approx(3 / 5)  # 1 of 2, 2 of 2, 0 of 1
    assert evaluate(make_args())[2]["contract/version_coverage"] == 0.0
