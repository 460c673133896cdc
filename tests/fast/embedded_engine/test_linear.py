"""Weight matrices: what one output row is must not depend on how many rows or threads there are."""

import pytest
import torch

from miles.backends.embedded_engine.linear import Linear


def make(shape, *, bias):
    torch.manual_seed(0)
    linear = Linear(*shape, bias=bias, device=torch.device("cpu"), dtype=torch.float32)
    linear.write(slice(0, shape[0]), torch.randn(shape))
    linear.seal()
    if linear.bias is not None:
        linear.bias.copy_(torch.randn(shape[0]))
    return linear


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("shape", [(96, 64), (384, 128), (600, 640)], ids=["plain", "plain wide", "packed"])
def test_a_row_does_not_depend_on_its_company(shape, bias):
    linear = make(shape, bias=bias)
    x, other = torch.randn(512, shape[1]), torch.randn(512, shape[0])
    products = {
        "product": lambda rows: linear(x[:rows]),
        "sum": lambda rows: linear.add_to(other[:rows], x[:rows]),
        "silu": lambda rows: linear.silu(x[:rows]),
        "times": lambda rows: linear.times(other[:rows], x[:rows]),
    }
    whole = {name: product(512) for name, product in products.items()}
    try:
        for threads in (1, 2):
            torch.set_num_threads(threads)
            for rows in (8, 16, 24, 40, 64, 136, 512):
                for name, product in products.items():
                    assert torch.equal(product(rows), whole[name][:rows]), (name, rows, threads)
    finally:
        torch.set_num_threads(1)


@pytest.mark.parametrize("shape", [(96, 64), (600, 640)], ids=["plain", "packed"])
def test_products_are_those_of_the_matrix(shape):
    linear = make(shape, bias=True)
    x, other = torch.randn(16, shape[1]), torch.randn(16, shape[0])
    want = x.double() @ linear.plain().double().T + linear.bias.double()
    close = {"rtol": 1e-5, "atol": 1e-4}
    torch.testing.assert_close(linear(x).double(), want, **close)
    torch.testing.assert_close(linear.add_to(other, x).double(), other + want, **close)
    torch.testing.assert_close(linear.silu(x).double(), torch.nn.functional.silu(want), **close)
    torch.testing.assert_close(linear.times(other, x).double(), other * want, **close)
