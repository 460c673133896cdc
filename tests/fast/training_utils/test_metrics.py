import pytest
import torch

from miles.backends.training_utils.metrics import StepMetrics
from tests.fast.training_utils.toy import reduce_over


def filled(total, count, high, low, share):
    m = StepMetrics()
    m.add("share", share)
    m.add_ratio("mean", total, count)
    m.add_max("high", high)
    m.add_min("low", low)
    return m


def test_ranks_join_by_kind():
    ranks = [filled(6.0, 2, 5.0, -1.0, 0.25), filled(torch.tensor(4.0), 3, 2.0, -7.0, 0.5)]
    assert reduce_over(ranks) == {"share": 0.75, "mean": 2.0, "high": 5.0, "low": -7.0}


def test_micro_batches_join_as_ranks_do():
    one = filled(6.0, 2, 5.0, -1.0, 0.25)
    one.merge(filled(4.0, 3, 2.0, -7.0, 0.5))
    assert one.reduce() == {"share": 0.75, "mean": 2.0, "high": 5.0, "low": -7.0}


def test_a_ratio_without_counts_is_zero():
    m = StepMetrics()
    m.add_ratio("mean", 0.0, 0)
    assert m.reduce() == {"mean": 0.0}


def test_one_collective_for_any_number_of_metrics():
    calls = []
    m = StepMetrics()
    for i in range(300):
        m.add(f"m{i}", float(i))
    m.reduce(lambda x: calls.append(x.shape) or x[None])
    assert len(calls) == 1


def test_order_of_addition_does_not_matter():
    a, b = StepMetrics(), StepMetrics()
    a.add("x", 1.0), a.add_max("y", 2.0)
    b.add_max("y", 3.0), b.add("x", 4.0)
    assert reduce_over([a, b]) == {"x": 5.0, "y": 3.0}


def test_ranks_with_other_metrics_are_noticed():
    a, b = StepMetrics(), StepMetrics()
    a.add("x", 1.0)
    b.add("z", 1.0)
    with pytest.raises(ValueError, match="ranks hold different metrics; this one has x"):
        reduce_over([a, b])


def test_ranks_with_fewer_metrics_still_meet_in_the_collective():
    """A gather of vectors of different lengths would hang or fail without saying why."""
    a, b = StepMetrics(), StepMetrics()
    a.add("x", 1.0)
    for i in range(200):
        b.add(f"m{i}", 1.0)
    with pytest.raises(ValueError, match="ranks hold different metrics"):
        reduce_over([a, b])


def test_one_name_one_kind():
    m = StepMetrics()
    m.add("x", 1.0)
    with pytest.raises(ValueError, match="metric x"):
        m.add_max("x", 1.0)
    other = StepMetrics()
    other.add_min("x", 1.0)
    with pytest.raises(ValueError, match="metric x"):
        m.merge(other)


def test_sums_keep_what_fp32_would_lose():
    m = StepMetrics()
    m.add_ratio("mean", torch.tensor(2.0**24), 1)
    m.add_ratio("mean", torch.tensor(1.0), 1)
    assert m.reduce()["mean"] == (2**24 + 1) / 2


def test_gradients_are_not_kept():
    x = torch.ones((), requires_grad=True)
    m = StepMetrics()
    m.add("x", x * 2)
    assert m.reduce() == {"x": 2.0}
    assert not m._values["x"][0].requires_grad


def test_effective_sample_size_is_of_all_ranks_weights_together():
    """Each rank alone has equal weights, and so an effective size of 1; together they have not."""
    a, b = StepMetrics(), StepMetrics()
    a.add_ess("ess", torch.full((3,), 1.0))
    b.add_ess("ess", torch.full((1,), 5.0))
    assert a.reduce() == {"ess": 1.0}
    assert reduce_over([a, b]) == {"ess": pytest.approx((3 + 5) ** 2 / (4 * (3 + 25)))}
    empty = StepMetrics()
    empty.add_ess("ess", torch.zeros(0))
    assert empty.reduce() == {"ess": 0.0}


def test_quantiles_of_ratios_equal_those_of_the_sorted_values_on_any_split():
    log_ratios = torch.randn(5000, generator=torch.Generator().manual_seed(2), dtype=torch.float64) * 0.3
    ranks = [StepMetrics(), StepMetrics()]
    for metrics, part in zip(ranks, (log_ratios[:4000], log_ratios[4000:]), strict=True):
        for piece in part.split(700):
            metrics.add_quantiles("m", piece)
    found = reduce_over(ranks)
    for name, q in (("m/p01", 0.01), ("m/p50", 0.5), ("m/p99", 0.99)):
        want = float(log_ratios.quantile(q))
        assert abs(torch.tensor(found[name]).log() - want) < 0.06 * abs(want) + 0.01, name


def test_ratios_of_one_have_quantiles_of_exactly_one_and_far_ones_their_edge():
    m = StepMetrics()
    m.add_quantiles("m", torch.zeros(7))
    assert m.reduce() == {"m/p01": 1.0, "m/p50": 1.0, "m/p99": 1.0}
    far = StepMetrics()
    far.add_quantiles("m", torch.tensor([-500.0, 0.0, 500.0]))
    assert far.reduce() == pytest.approx({"m/p01": 2.06e-9, "m/p50": 1.0, "m/p99": 4.85e8}, rel=0.01)


def test_explained_variance_is_of_the_whole_step():
    g = torch.randn(40, generator=torch.Generator().manual_seed(3))
    v = 0.6 * g + 0.1
    ranks = [StepMetrics(), StepMetrics()]
    for metrics, part in zip(ranks, (slice(0, 30), slice(30, 40)), strict=True):
        metrics.add_explained_variance("e", g[part], v[part])
    assert reduce_over(ranks) == {"e": pytest.approx(1 - 0.16, rel=1e-5)}
    constant = StepMetrics()
    constant.add_explained_variance("e", torch.ones(4), torch.zeros(4))
    assert constant.reduce() == {"e": 0.0}
