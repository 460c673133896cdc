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
