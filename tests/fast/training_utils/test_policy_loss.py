import math

import pytest
import torch

from miles.backends.training_utils.columns import MicroBatch
from miles.backends.training_utils.loss_hub.reducers import StepTotals
from miles.backends.training_utils.objective import custom_objective, policy_objective, sft_objective
from miles.utils.imports import register_function
from tests.fast.training_utils.toy import make_args

NAN, INF = float("nan"), float("inf")

LOG_PROBS = [[-1.0, -0.2, -2.0], [-0.7, -3.0], [-1.1]]
OLD = [[-1.5, -0.9, -1.9], [-0.6, -2.0], [-1.1]]
ROLLOUT = [[-1.4, -0.2, -2.2], [-0.7, -2.9], [-1.0]]
REF = [[-1.2, -0.4, -1.0], [-0.1, -2.5], [-2.0]]
ADVANTAGES = [[1.0, 1.0, 1.0], [-2.0, -2.0], [0.5]]
MASKS = [[1, 0, 1], [1, 1], [1]]
SUMS = [4, 4, 1]  # the first two samples are one execution
TOTALS = StepTotals(num_rollouts=2, num_tokens=5)


def flat(rows):
    return [x for row in rows for x in row]


def columns(**changes):
    base = dict(
        tokens=[[0] * (len(m) + 2) for m in MASKS],
        total_lengths=[len(m) + 2 for m in MASKS],
        response_lengths=[len(m) for m in MASKS],
        loss_masks=MASKS,
        rollout_mask_sums=SUMS,
        log_probs=OLD,
        rollout_log_probs=ROLLOUT,
        ref_log_probs=REF,
        advantages=ADVANTAGES,
    )
    return {k: v for k, v in {**base, **changes}.items() if v is not None}


def evaluate(args, log_probs=None, entropy=None, *, columns_=None, totals=TOTALS, **kwargs):
    """(loss, gradient by the log-probs, metrics)."""
    leaf = torch.tensor(flat(log_probs or LOG_PROBS), requires_grad=True)
    cols = columns_ or columns()
    batch = MicroBatch.from_columns(args, cols, range(len(cols["tokens"])))
    objective = policy_objective(args, batch, leaf, entropy, totals, **kwargs)
    (grad,) = torch.autograd.grad(objective.loss, leaf)
    return objective.loss.item(), grad, objective.metrics.reduce()


def slow_token_losses(args, old=OLD, log_probs=LOG_PROBS):
    """Per-token losses [sample][token], written out with python floats."""
    low, high = 1 - args.eps_clip, 1 + (args.eps_clip if args.eps_clip_high is None else args.eps_clip_high)
    out, clips = [], []
    for mask, lp, lo, advantage in zip(MASKS, log_probs, old, ADVANTAGES, strict=True):
        mean = sum(m * (a - b) for m, a, b in zip(mask, lp, lo, strict=True)) / max(sum(mask), 1)
        losses, clipped = [], []
        for t in range(len(mask)):
            log_ratio = mean if args.advantage_estimator == "gspo" else lp[t] - lo[t]
            ratio = math.exp(min(max(log_ratio, -20), 20))
            weight = min(max(ratio, low), high)
            a = advantage[t]
            if args.advantage_estimator == "cispo":
                losses.append(-weight * a * lp[t])
                clipped.append(float(weight != ratio))
                continue
            plain, cut = -ratio * a, -weight * a
            loss = max(plain, cut)
            if args.eps_clip_c is not None and a < 0:
                loss = min(-args.eps_clip_c * a, loss)
            losses.append(loss)
            clipped.append(float(cut > plain))
        out.append(losses)
        clips.append(clipped)
    return out, clips


def slow_reduce(args, per_token, masks=MASKS, sums=SUMS):
    if args.calculate_per_token_loss:
        return sum(x * m for xs, ms in zip(per_token, masks, strict=True) for x, m in zip(xs, ms, strict=True)) / 5
    total = 0.0
    for xs, ms, d in zip(per_token, masks, sums, strict=True):
        total += sum(x * m for x, m in zip(xs, ms, strict=True)) / max(d, 1)
    return total / 2


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


# ---- corrections ------------------------------------------------------------------------------------------------------

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


# ---- other losses -----------------------------------------------------------------------------------------------------


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
    assert objective.metrics.reduce() == pytest.approx({"train/loss": want, "train/mine": want})


def test_custom_loss_without_a_path_names_the_flag():
    args = make_args(loss_type="custom_loss", custom_loss_function_path=None)
    with pytest.raises(ValueError, match="--custom-loss-function-path"):
        custom_objective(args, MicroBatch.from_columns(args, columns(), range(3)), torch.ones(1, 6, 1), TOTALS)
