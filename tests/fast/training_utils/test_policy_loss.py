import math

import pytest
import torch

from miles.backends.training_utils.columns import MicroBatch
from miles.backends.training_utils.objective import policy_objective
from miles.utils.imports import register_function
from tests.fast.training_utils.example import (
    ADVANTAGES,
    INF,
    LOG_PROBS,
    MASKS,
    NAN,
    OLD,
    REF,
    TOTALS,
    columns,
    evaluate,
    flat,
    slow_reduce,
    slow_token_losses,
)
from tests.fast.training_utils.toy import make_args


@pytest.mark.parametrize("estimator", ["grpo", "gspo", "cispo", "reinforce_plus_plus"])
@pytest.mark.parametrize("per_token", [False, True])
@pytest.mark.parametrize("clips", [{}, dict(eps_clip_high=0.6), dict(eps_clip_c=1.2)])
def test_loss_and_clipfrac_written_out(estimator, per_token, clips):
    args = make_args(advantage_estimator=estimator, calculate_per_token_loss=per_token, **clips)
    loss, _, metrics = evaluate(args)
    losses, clipped = slow_token_losses(args)
    assert loss == pytest.approx(slow_reduce(args, losses), rel=1e-5)
    assert metrics["train/loss"] == metrics["train/pg_loss"] == pytest.approx(loss, rel=1e-6)
    assert metrics["train/pg_clipfrac"] == pytest.approx(slow_reduce(args, clipped), rel=1e-5)


@pytest.mark.parametrize("estimator", ["grpo", "gspo"])
def test_gradient_equals_finite_differences(estimator):
    args = make_args(advantage_estimator=estimator, eps_clip=0.9, eps_clip_high=2.0)
    _, grad, _ = evaluate(args)
    for position in range(6):
        sides = []
        for step in (1e-4, -1e-4):
            values = flat(LOG_PROBS)
            values[position] += step
            moved = [values[:3], values[3:5], values[5:]]
            sides.append(slow_reduce(args, slow_token_losses(args, log_probs=moved)[0]))
        assert grad[position].item() == pytest.approx((sides[0] - sides[1]) / 2e-4, abs=1e-4)


def test_cispo_gradient_flows_through_the_log_prob_alone():
    args = make_args(advantage_estimator="cispo", eps_clip=1.0, eps_clip_high=0.5)
    _, grad, _ = evaluate(args)
    for position, (lp, old, a, m, d) in enumerate(
        zip(flat(LOG_PROBS), flat(OLD), flat(ADVANTAGES), flat(MASKS), [4] * 5 + [1], strict=True)
    ):
        weight = min(math.exp(lp - old), 1.5)
        assert grad[position].item() == pytest.approx(-weight * a * m / d / 2, rel=1e-4)


def test_only_the_current_policy_gets_a_gradient():
    args = make_args(use_kl_loss=True, kl_loss_coef=0.5, use_tis=True)
    names = ("log_probs", "ref_log_probs", "rollout_log_probs", "advantages")
    data = {n: [torch.tensor(x, requires_grad=True) for x in columns()[n]] for n in names}
    current = torch.tensor(flat(LOG_PROBS), requires_grad=True)
    batch = MicroBatch.from_columns(args, columns(**data), range(3))
    policy_objective(args, batch, current, None, TOTALS).loss.backward()
    assert current.grad.abs().sum() > 0
    assert all(x.grad is None for tensors in data.values() for x in tensors)


def test_dual_clip_constant_must_exceed_one():
    with pytest.raises(ValueError, match=r"--eps-clip-c 1\.0"):
        evaluate(make_args(eps_clip_c=1.0))


# ---- numerics ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("estimator", ["grpo", "gspo", "cispo", "reinforce_plus_plus_baseline"])
@pytest.mark.parametrize("bad", [NAN, INF, -INF])
@pytest.mark.parametrize("where", ["log_probs", "current", "rollout_log_probs", "ref_log_probs", "advantages"])
def test_a_bad_value_at_a_masked_position_reaches_nothing(estimator, bad, where):
    args = make_args(
        advantage_estimator=estimator,
        use_tis=True,
        use_opsm=True,
        use_kl_loss=True,
        kl_loss_coef=0.1,
        kl_loss_type="k3",
        use_unbiased_kl=True,
        entropy_coef=0.01,
    )
    entropy = torch.ones(6)
    clean = evaluate(args, entropy=entropy)
    current, cols = [list(x) for x in LOG_PROBS], columns()
    if where == "current":
        current[0][1] = bad
    else:
        cols[where] = [list(x) for x in cols[where]]
        cols[where][0][1] = bad
    dirty = evaluate(args, current, torch.tensor([1.0, bad, 1.0, 1.0, 1.0, 1.0]), columns_=cols)
    assert dirty[0] == clean[0]
    assert torch.equal(dirty[1], clean[1])
    assert dirty[2] == clean[2]
    assert dirty[2]["train/nonfinite_tokens"] == 0


def test_a_bad_value_at_a_trained_position_is_zeroed_and_counted():
    cols = columns()
    cols["advantages"] = [[NAN, 1.0, 1.0], [-2.0, INF], [0.5]]
    loss, grad, metrics = evaluate(make_args(), columns_=cols)
    assert math.isfinite(loss) and torch.isfinite(grad).all()
    assert grad[0] == grad[4] == 0
    assert metrics["train/nonfinite_tokens"] == 2
    cols["ref_log_probs"] = [[NAN, NAN, -1.0], [-0.1, NAN], [NAN]]
    _, _, metrics = evaluate(make_args(use_kl_loss=True), columns_=cols)
    assert metrics["train/nonfinite_tokens"] == 3, "each token once, masked ones not at all"


def test_extreme_ratios_stay_finite():
    far = [[-200.0, -0.2, 0.0], [-0.7, -300.0], [0.0]]
    cols = columns(log_probs=[[0.0, -0.9, -250.0], [-0.6, 0.0], [-200.0]], advantages=[[0.0] * 3, [0.0] * 2, [0.0]])
    loss, grad, metrics = evaluate(make_args(), far, columns_=cols)
    assert loss == 0.0 and (grad == 0).all() and all(map(math.isfinite, metrics.values()))
    loss, grad, _ = evaluate(make_args(use_kl_loss=True, kl_loss_coef=1.0, kl_loss_type="k3"), far, columns_=cols)
    assert math.isfinite(loss) and torch.isfinite(grad).all()


def test_observed_entropy_never_reaches_the_loss():
    plain = evaluate(make_args())
    entropy = torch.full((6,), NAN)
    observed = evaluate(make_args(observe_training_entropy=True), entropy=entropy)
    assert observed[0] == plain[0] and torch.equal(observed[1], plain[1])


def test_a_fully_masked_micro_batch_has_loss_zero_and_still_a_gradient():
    cols = columns(loss_masks=[[0] * 3, [0] * 2, [0]], rollout_mask_sums=[0, 0, 0])
    loss, grad, metrics = evaluate(make_args(use_tis=True, use_opsm=True), columns_=cols)
    assert loss == 0.0 and (grad == 0).all() and all(map(math.isfinite, metrics.values()))


# ---- terms ------------------------------------------------------------------------------------------------------------


def test_entropy_bonus_and_kl_written_out():
    args = make_args(entropy_coef=0.1, use_kl_loss=True, kl_loss_coef=0.2, kl_loss_type="k2")
    entropy = torch.tensor([1.0, 50.0, 2.0, 3.0, 0.5, 1.5])
    loss, _, metrics = evaluate(args, entropy=entropy)
    bonus = slow_reduce(args, [[1.0, 50.0, 2.0], [3.0, 0.5], [1.5]])
    kl = slow_reduce(
        args, [[(a - b) ** 2 / 2 for a, b in zip(p, q, strict=True)] for p, q in zip(LOG_PROBS, REF, strict=True)]
    )
    pg = slow_reduce(args, slow_token_losses(args)[0])
    assert metrics["train/entropy_loss"] == pytest.approx(bonus) and metrics["train/kl_loss"] == pytest.approx(kl)
    assert loss == pytest.approx(pg - 0.1 * bonus + 0.2 * kl, rel=1e-5)


def test_opsm_drops_negative_tokens_of_sequences_that_drifted():
    args = make_args(use_opsm=True, opsm_delta=0.1)
    loss, _, metrics = evaluate(args)
    losses, _ = slow_token_losses(args)
    # Sample 1: mean(old - new) over its tokens is (0.1 + 1.0) / 2 > 0.1, and A < 0: both tokens leave.
    losses[1] = [0.0, 0.0]
    assert loss == pytest.approx(slow_reduce(args, losses), rel=1e-5)
    assert metrics["train/opsm_clipfrac"] == pytest.approx(slow_reduce(args, [[0] * 3, [1, 1], [0]]))
    kept, _, metrics = evaluate(make_args(use_opsm=True, opsm_delta=10.0))
    assert metrics["train/opsm_clipfrac"] == 0 and kept != loss


def test_ppo_kl_and_ess_written_out():
    args = make_args()
    _, _, metrics = evaluate(args)
    difference = [[b - a for a, b in zip(p, q, strict=True)] for p, q in zip(LOG_PROBS, OLD, strict=True)]
    assert metrics["train/ppo_kl"] == pytest.approx(slow_reduce(args, difference), rel=1e-4)
    ess = []
    for mask, d in zip(MASKS, difference, strict=True):
        w = [math.exp(-x) for x, m in zip(d, mask, strict=True) if m]
        ess.append(sum(w) ** 2 / (len(w) * sum(x * x for x in w)))
    assert metrics["train/ess_ratio"] == pytest.approx(sum(ess) / 3, rel=1e-5)


def test_distillation_is_reported():
    _, _, metrics = evaluate(make_args(), columns_=columns(opd_reverse_kl=[[1.0, NAN, 3.0], [0.5, 0.5], [2.0]]))
    assert metrics["train/opd_reverse_kl"] == pytest.approx(
        slow_reduce(make_args(), [[1.0, 0, 3.0], [0.5, 0.5], [2.0]])
    )


# ---- which log-probs are old -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["flag", "argument"])
def test_current_log_probs_can_stand_in_for_the_old_ones(how):
    args = make_args(skip_actor_forward_only=how == "flag")
    loss, grad, metrics = evaluate(args, columns_=columns(log_probs=None), old_is_current=how == "argument")
    explicit = evaluate(make_args(), columns_=columns(log_probs=LOG_PROBS))
    assert loss == explicit[0] and torch.equal(grad, explicit[1]) and metrics == explicit[2]
    assert metrics["train/ppo_kl"] == 0 and metrics["train/ess_ratio"] == 1


def test_missing_old_log_probs_are_an_error():
    with pytest.raises(ValueError, match="column log_probs"):
        evaluate(make_args(), columns_=columns(log_probs=None))
    with pytest.raises(ValueError, match="no rollout_log_probs"):
        evaluate(make_args(use_rollout_logprobs=True), columns_=columns(rollout_log_probs=None))
    with pytest.raises(ValueError, match="compute_advantages"):
        evaluate(make_args(), columns_=columns(advantages=None))
    with pytest.raises(ValueError, match="no ref_log_probs"):
        evaluate(make_args(use_kl_loss=True), columns_=columns(ref_log_probs=None))
    with pytest.raises(ValueError, match="computed no entropy"):
        evaluate(make_args(entropy_coef=0.1))


def test_custom_reducer_gets_the_public_arguments():
    def reducer(total_lengths, response_lengths, masks, calculate_per_token_loss):
        assert total_lengths == [5, 4, 3] and response_lengths == [3, 2, 1] and calculate_per_token_loss is False
        return lambda x: (torch.cat(masks) * x).sum() / 100  # a constant denominator

    register_function("tests.reducer", reducer)
    args = make_args(custom_pg_loss_reducer_function_path="tests.reducer")
    loss, _, _ = evaluate(args)
    losses, _ = slow_token_losses(args)
    want = sum(x * m for xs, ms in zip(losses, MASKS, strict=True) for x, m in zip(xs, ms, strict=True)) / 100 / 2
    assert loss == pytest.approx(want, rel=1e-5)
