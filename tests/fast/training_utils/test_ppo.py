"""Generalised advantage estimation over trainable tokens, and the critic's loss."""

import pytest
import torch

from miles.backends.training_utils.advantages import compute_advantages
from miles.backends.training_utils.columns import MicroBatch
from miles.backends.training_utils.loss_hub.registry import get_estimator
from miles.backends.training_utils.loss_hub.value_loss import value_objective
from tests.fast.training_utils.example import MASKS, NAN, TOTALS, columns, flat, slow_reduce
from tests.fast.training_utils.toy import make_args


def gae(rewards, masks, values, gamma=0.9, lambd=0.8, **changes):
    args = make_args(advantage_estimator="ppo", gamma=gamma, lambd=lambd, **changes)
    result = compute_advantages(args, dict(rewards=rewards, loss_masks=masks, values=values))
    return [a.tolist() for a in result.advantages], [r.tolist() for r in result.returns]


def slow_gae(reward, mask, values, gamma, lambd):
    """The recursion over trainable tokens, one by one from the end."""
    advantages, returns = [0.0] * len(mask), [0.0] * len(mask)
    next_value = next_advantage = 0.0
    terminal = reward
    for t in reversed(range(len(mask))):
        if not mask[t]:
            continue
        delta = terminal + gamma * next_value - values[t]
        next_advantage = advantages[t] = delta + gamma * lambd * next_advantage
        returns[t] = advantages[t] + values[t]
        next_value, terminal = values[t], 0.0
    return advantages, returns


@pytest.mark.parametrize(("gamma", "lambd"), [(1.0, 1.0), (0.99, 0.95), (0.5, 0.0), (1.0, 0.9)])
def test_gae_written_out_with_gaps_and_beyond_one_chunk(gamma, lambd):
    g = torch.Generator().manual_seed(1)
    lengths = [1, 5, 127, 300]
    masks = [(torch.rand(n, generator=g) < 0.7).int().tolist() for n in lengths]
    masks[0], masks[1] = [1], [0, 1, 0, 1, 0]
    values = [torch.randn(n, generator=g).tolist() for n in lengths]
    rewards = [1.0, -2.0, 0.5, 3.0]
    advantages, returns = gae(rewards, masks, values, gamma, lambd)
    for i in range(4):
        want = slow_gae(rewards[i], masks[i], values[i], gamma, lambd)
        assert advantages[i] == pytest.approx(want[0], rel=1e-4, abs=1e-5)
        assert returns[i] == pytest.approx(want[1], rel=1e-4, abs=1e-5)


def test_a_gap_of_observations_is_no_step_of_time():
    """With the gap taken out the trained tokens have the same advantages: nothing decays across it."""
    gapped, _ = gae([1.0], [[1, 1, 0, 0, 0, 1, 0]], [[0.3, 0.1, 9.0, 9.0, 9.0, -0.2, 9.0]])
    compressed, _ = gae([1.0], [[1, 1, 1]], [[0.3, 0.1, -0.2]])
    assert [gapped[0][t] for t in (0, 1, 5)] == compressed[0]
    assert [gapped[0][t] for t in (2, 3, 4, 6)] == [0.0] * 4


def test_the_reward_belongs_to_the_last_trained_token_and_nothing_follows_it():
    """delta of the last token is R - V: no value is bootstrapped behind it, truncated or not."""
    advantages, returns = gae([5.0], [[1, 1, 0]], [[0.0, 2.0, 7.0]])
    assert advantages[0][1] == 3.0 and returns[0][1] == 5.0 and advantages[0][2] == returns[0][2] == 0.0
    assert advantages[0][0] == pytest.approx(0.9 * 2.0 + 0.9 * 0.8 * 3.0)


def test_a_response_that_trains_nothing_has_zeros():
    advantages, returns = gae([5.0, 1.0], [[0, 0], [1]], [[1.0, 2.0], [0.0]])
    assert advantages == [[0.0, 0.0], [1.0]] and returns == [[0.0, 0.0], [1.0]]


def test_values_of_masked_positions_reach_nothing():
    clean = gae([1.0], [[1, 0, 1]], [[0.5, 0.0, 0.25]])
    assert gae([1.0], [[1, 0, 1]], [[0.5, NAN, 0.25]]) == clean


def test_values_are_data_and_get_no_gradient():
    values = [torch.tensor([0.1, 0.2], requires_grad=True)]
    args = make_args(advantage_estimator="ppo")
    result = compute_advantages(args, dict(rewards=[1.0], loss_masks=[[1, 1]], values=values))
    assert not result.advantages[0].requires_grad and not result.returns[0].requires_grad


def test_what_ppo_lacks_is_named():
    assert get_estimator("ppo").needs_values
    with pytest.raises(ValueError, match="critic's values"):
        compute_advantages(make_args(advantage_estimator="ppo"), dict(rewards=[1.0], loss_masks=[[1]]))
    with pytest.raises(ValueError, match="use --use-kl-loss"):
        get_estimator("ppo").advantages(make_args(kl_coef=0.1), _Inputs())


class _Inputs:
    values = rewards = loss_masks = kl = ()


# ---- the critic's loss -------------------------------------------------------------------------------------------------

VALUES = [[0.5, 9.0, -1.0], [0.1, 2.0], [0.0]]
OLD_VALUES = [[0.4, 9.0, 0.0], [0.1, 1.0], [3.0]]
RETURNS = [[1.0, 9.0, 1.0], [-1.0, 3.0], [2.0]]


def value_loss(current=VALUES, **changes):
    args = make_args(value_clip=0.2)
    batch = MicroBatch.from_columns(args, columns(**{"values": OLD_VALUES, "returns": RETURNS, **changes}), range(3))
    leaf = torch.tensor(flat(current), requires_grad=True)
    objective = value_objective(args, batch, leaf, TOTALS)
    (grad,) = torch.autograd.grad(objective.loss, leaf)
    return objective.loss.item(), grad, objective.metrics.reduce()


def test_value_loss_written_out():
    loss, grad, metrics = value_loss()
    losses, clipped = [], []
    for vs, os, gs in zip(VALUES, OLD_VALUES, RETURNS, strict=True):
        row, bits = [], []
        for v, o, g in zip(vs, os, gs, strict=True):
            near = o + min(max(v - o, -0.2), 0.2)
            row.append(max((v - g) ** 2, (near - g) ** 2))
            bits.append(float((near - g) ** 2 > (v - g) ** 2))
        losses.append(row)
        clipped.append(bits)
    args = make_args()
    assert loss == metrics["train/value_loss"] == metrics["train/loss"] == pytest.approx(slow_reduce(args, losses))
    assert metrics["train/value_clipfrac"] == pytest.approx(slow_reduce(args, clipped)) and any(flat(clipped))
    # 2 (V - G) / D / rollouts where the plain square is the larger, 0 where the clipped one is: it does not move.
    assert grad[0].item() == pytest.approx(2 * (0.5 - 1.0) / 4 / 2) and grad[1] == 0
    assert grad[4] == 0 and clipped[1][1] == 1.0


@pytest.mark.parametrize("where", ["current", "values", "returns"])
def test_what_is_masked_reaches_neither_the_value_loss_nor_its_gradient(where):
    clean = value_loss()
    bad = [[1.0, NAN, 1.0], [1.0, 1.0], [1.0]]
    rows = {"current": VALUES, "values": OLD_VALUES, "returns": RETURNS}[where]
    dirty = [[b if m == 0 else x for x, b, m in zip(*z, strict=True)] for z in zip(rows, bad, MASKS, strict=True)]
    got = value_loss(dirty) if where == "current" else value_loss(**{where: dirty})
    assert got[0] == clean[0] and torch.equal(got[1], clean[1]) and got[2] == clean[2]


def test_a_value_that_is_not_finite_is_counted():
    _, grad, metrics = value_loss([[NAN, 0.0, 0.0], [0.0, 0.0], [0.0]])
    assert metrics["train/nonfinite_tokens"] == 1 and torch.isfinite(grad).all()


@pytest.mark.parametrize("lacking", ["values", "returns"])
def test_a_batch_that_the_critic_did_not_score_is_refused(lacking):
    with pytest.raises(ValueError, match=f"the column {lacking}"):
        value_loss(**{lacking: None})
