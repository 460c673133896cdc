import math

import pytest
import torch

from miles.backends.training_utils.advantages import compute_advantages
from miles.backends.training_utils.loss_hub.base import discounted_suffix_sums
from miles.backends.training_utils.loss_hub.registry import get_estimator
from miles.backends.training_utils.loss_hub.whitening import whiten
from tests.fast.training_utils.toy import make_args

PLUS = dict(advantage_estimator="reinforce_plus_plus", normalize_advantages=True)


def raw_returns(args, columns, log_probs=None, ref=None):
    return compute_advantages(args, columns, log_probs, ref).returns


@pytest.mark.parametrize("estimator", ["grpo", "gspo", "cispo"])
def test_group_relative_estimators_repeat_the_reward(estimator):
    columns = dict(rewards=[0.5, -2.0], loss_masks=[[1, 1, 0], [1]])
    result = compute_advantages(make_args(advantage_estimator=estimator), columns)
    assert [a.tolist() for a in result.advantages] == [[0.5] * 3, [-2.0]]
    assert [r.tolist() for r in result.returns] == [[0.5] * 3, [-2.0]]


def test_reinforce_plus_plus_passes_observations_undiscounted():
    """Mask [1, 0, 1] with gamma 0.5: the observation is no step, so the first token's return is half, not a quarter."""
    columns = dict(rewards=[1.0, 1.0], loss_masks=[[1, 0, 1], [1, 1]])
    returns = raw_returns(make_args(**PLUS, gamma=0.5), columns)
    assert returns[0].tolist() == [0.5, 0.0, 1.0] and returns[1].tolist() == [0.5, 1.0]


def test_reinforce_plus_plus_written_out_with_kl():
    masks = [[1, 1, 0, 1, 0], [0, 0], [1]]
    rewards = [2.0, 5.0, -1.0]
    p = [torch.tensor([-1.0, -2.0, -9.0, -0.5, -9.0]), torch.tensor([-1.0, -1.0]), torch.tensor([-0.2])]
    q = [torch.tensor([-1.5, -1.0, -0.1, -0.5, -0.1]), torch.tensor([-3.0, -1.0]), torch.tensor([-0.7])]
    args = make_args(**PLUS, gamma=0.9, kl_coef=0.3, kl_loss_type="k1")
    got = raw_returns(args, dict(rewards=rewards, loss_masks=masks), p, q)
    for mask, reward, a, b, result in zip(masks, rewards, p, q, got, strict=True):
        steps = [t for t, m in enumerate(mask) if m]
        expected, following = [0.0] * len(mask), 0.0
        for t in reversed(steps):
            r = -0.3 * float(a[t] - b[t]) + (reward if t == steps[-1] else 0.0)
            following = expected[t] = r + 0.9 * following
        assert result.tolist() == pytest.approx(expected, rel=1e-5, abs=1e-6)
    assert got[1].tolist() == [0.0, 0.0], "a fully masked response is zeros, not an error"


def test_baseline_variant_takes_kl_off_every_trained_token():
    args = make_args(advantage_estimator="reinforce_plus_plus_baseline", normalize_advantages=True, kl_coef=0.5)
    p, q = [torch.tensor([-1.0, -2.0])], [torch.tensor([-2.0, -4.0])]
    got = raw_returns(args, dict(rewards=[3.0], loss_masks=[[1, 0]]), p, q)
    assert got[0].tolist() == [2.5, 3.0]


@pytest.mark.parametrize("gamma", [1.0, 0.97, 0.0])
@pytest.mark.parametrize("n", [0, 1, 127, 128, 129, 300])
def test_chunked_suffix_sums_equal_the_recursion(gamma, n):
    x = torch.randn(n, generator=torch.Generator().manual_seed(n))
    following, expected = 0.0, [0.0] * n
    for t in reversed(range(n)):
        following = expected[t] = float(x[t]) + gamma * following
    torch.testing.assert_close(discounted_suffix_sums(x, gamma), torch.tensor(expected), rtol=1e-5, atol=1e-5)


# ---- whitening --------------------------------------------------------------------------------------------------------

VALUES = [torch.tensor([1.0, 5.0, 100.0]), torch.tensor([-2.0]), torch.tensor([4.0, 0.5])]
MASKS = [torch.tensor([1.0, 1.0, 0.0]), torch.tensor([1.0]), torch.tensor([0.0, 1.0])]


def test_whitening_written_out():
    kept = [1.0, 5.0, -2.0, 0.5]
    mean = sum(kept) / 4
    std = math.sqrt(sum((x - mean) ** 2 for x in kept) / 3 + 1e-8)
    for got, x in zip(whiten(VALUES, MASKS), VALUES, strict=True):
        assert got.tolist() == pytest.approx([(v - mean) / std for v in x.tolist()], rel=1e-6)


def test_whitening_is_the_same_however_tokens_lie_on_ranks():
    """Four ranks, one of them without a trainable token; every rank makes the same calls."""
    whole = whiten(VALUES, MASKS)
    shards = [([VALUES[0]], [MASKS[0]]), ([VALUES[1]], [MASKS[1]]), ([VALUES[2]], [MASKS[2]])]
    shards.append(([torch.tensor([7.0])], [torch.tensor([0.0])]))
    calls = []  # what each rank put into its reductions
    for values, masks in shards:
        put = []
        whiten(values, masks, lambda x, put=put: put.append(x.clone()) or torch.ones_like(x))
        calls.append(put)
    assert {len(put) for put in calls} == {2}, "no rank skips a reduction"
    first = sum(put[0] for put in calls)
    mean = first[1] / first[0]
    seconds = sum(
        torch.where(m > 0, v.double() - mean, 0.0).square().sum()
        for vs, ms in shards
        for v, m in zip(vs, ms, strict=True)
    )
    for position, (values, masks) in enumerate(shards[:3]):
        replies = iter([first, seconds.reshape(1)])
        got = whiten(values, masks, lambda _, replies=replies: next(replies))
        torch.testing.assert_close(got[0], whole[position])


def test_whitening_without_a_trained_token_says_so_on_every_rank():
    with pytest.raises(ValueError, match="no token of the rollout batch trains"):
        whiten([torch.ones(2)], [torch.zeros(2)])


def test_masked_nan_does_not_reach_the_moments():
    values = [torch.tensor([1.0, float("nan"), 3.0])]
    got = whiten(values, [torch.tensor([1.0, 0.0, 1.0])])[0]
    assert got[0].item() == pytest.approx(-1 / math.sqrt(2)) and got[2].item() == pytest.approx(1 / math.sqrt(2))


# ---- what is missing is said -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (dict(advantage_estimator="reinforce_plus_plus"), "needs --normalize-advantages"),
        (dict(advantage_estimator="ppo2"), "--advantage-estimator 'ppo2' is not one of grpo"),
        (dict(kl_coef=0.1), "the policy's own log-probs were not scored"),
        (dict(use_opd=True), "student's"),
    ],
)
def test_missing_inputs_are_named(changes, message):
    with pytest.raises(ValueError, match=message):
        compute_advantages(make_args(**changes), dict(rewards=[1.0], loss_masks=[[1]]))


def test_rewards_pass_no_gradient_and_masked_kl_is_zero():
    p = [torch.tensor([-1.0, float("nan")], requires_grad=True)]
    q = [torch.tensor([-2.0, 0.0])]
    args = make_args(advantage_estimator="reinforce_plus_plus_baseline", normalize_advantages=True, kl_coef=0.5)
    result = compute_advantages(args, dict(rewards=[1.0], loss_masks=[[1, 0]]), p, q)
    assert not any(x.requires_grad for x in result.advantages + result.returns)
    assert result.kl[0].tolist() == [1.0, 0.0]


def test_distillation_takes_the_reverse_kl_off_before_whitening():
    args = make_args(use_opd=True, opd_kl_coef=2.0)
    columns = dict(rewards=[1.0], loss_masks=[[1, 1]], teacher_log_probs=[[-1.0, -3.0]])
    result = compute_advantages(args, columns, [torch.tensor([-1.5, -2.0])])
    assert result.advantages[0].tolist() == [1.0 - 2 * -0.5, 1.0 - 2 * 1.0]
    assert result.opd_reverse_kl[0].tolist() == [-0.5, 1.0]
    given = dict(rewards=[1.0], loss_masks=[[1, 1]], opd_reverse_kl=[[0.25, 0.0]])
    assert compute_advantages(args, given).advantages[0].tolist() == [0.5, 1.0]


def test_distillation_refuses_lengths_that_would_broadcast():
    args = make_args(use_opd=True)
    columns = dict(rewards=[1.0], loss_masks=[[1, 1]], teacher_log_probs=[[-1.0]])
    with pytest.raises(ValueError, match=r"samples \[0\]"):
        compute_advantages(args, columns, [torch.tensor([-1.5, -2.0])])


def test_the_registry_knows_which_estimators_need_what():
    assert get_estimator("reinforce_plus_plus").needs_whitening
    assert not get_estimator("reinforce_plus_plus").centers_rewards
    assert get_estimator("reinforce_plus_plus_baseline").centers_rewards
    assert not get_estimator("reinforce_plus_plus_baseline").scales_rewards
    assert get_estimator("gspo").sequence_ratio and not get_estimator("grpo").sequence_ratio
