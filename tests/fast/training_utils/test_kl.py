import math

import pytest
import torch

from miles.backends.training_utils.loss_hub.kl import KL_TYPES, compute_approx_kl, importance_ratio


def slow(kind, p, q):
    d = p - q
    if kind == "k1":
        return d
    if kind == "k2":
        return d * d / 2
    return math.exp(-d) - 1 + d


@pytest.mark.parametrize("kind", KL_TYPES)
def test_values_and_gradients_in_the_normal_range(kind):
    p = torch.tensor([-1.0, -2.5, -0.3, -4.0], requires_grad=True)
    q = torch.tensor([-1.5, -1.0, -0.3, -2.0])
    kl = compute_approx_kl(p, q, kind)
    for got, a, b in zip(kl.tolist(), p.tolist(), q.tolist(), strict=True):
        assert got == pytest.approx(slow(kind, a, b), rel=1e-5, abs=1e-6)
    (grad,) = torch.autograd.grad(kl.sum(), p)
    for got, a, b in zip(grad.tolist(), p.tolist(), q.tolist(), strict=True):
        step = 1e-6
        want = (slow(kind, a + step, b) - slow(kind, a - step, b)) / (2 * step)
        assert got == pytest.approx(want, rel=1e-3, abs=1e-4)


@pytest.mark.parametrize("kind", KL_TYPES)
@pytest.mark.parametrize("unbiased", [False, True])
@pytest.mark.parametrize("gap", [200.0, -200.0])
def test_a_log_ratio_of_200_is_finite_forward_and_backward(kind, unbiased, gap):
    p = torch.tensor([-1.0, -1.0], requires_grad=True)
    q = torch.tensor([-1.0 - gap, -1.2])
    ratio = importance_ratio(p, q) if unbiased else None
    kl = compute_approx_kl(p, q, kind, ratio)
    (grad,) = torch.autograd.grad(kl.sum(), p)
    assert torch.isfinite(kl).all() and torch.isfinite(grad).all()


def test_low_var_kl_takes_nan_as_agreement_and_is_bounded():
    p = torch.tensor([float("nan"), 0.0, 0.0])
    q = torch.tensor([0.0, 15.0, -15.0])
    kl = compute_approx_kl(p, q, "low_var_kl")
    assert kl.tolist() == [0.0, 10.0, 10.0]


def test_unbiased_weights_come_before_the_last_clamp():
    p, q = torch.tensor([-1.0]), torch.tensor([-1.5])
    plain = compute_approx_kl(p, q, "low_var_kl")
    weighted = compute_approx_kl(p, q, "low_var_kl", importance_ratio(p, torch.tensor([-2.0])))
    assert weighted.item() == pytest.approx(plain.item() * math.e, rel=1e-5)
    assert compute_approx_kl(p, q, "low_var_kl", torch.tensor([1e6])).item() == 10.0


def test_unknown_type_lists_the_known_ones():
    with pytest.raises(ValueError, match=r"k4.*k1, k2, k3, low_var_kl"):
        compute_approx_kl(torch.zeros(1), torch.zeros(1), "k4")
