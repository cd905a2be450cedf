"""Banded products against the plain one."""

import pytest
import torch
import torch.nn.functional as F

from stoop.ops import dense as ops
from stoop.ops.linear import linear


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("num_tokens", [1, 2, 4, 8])
@pytest.mark.parametrize("num_bands", [2, 4])
@pytest.mark.parametrize("with_bias", [False, True])
def test_bands_give_the_same_product(
    dtype: torch.dtype, num_tokens: int, num_bands: int, with_bias: bool
) -> None:
    generator = torch.Generator().manual_seed(num_tokens)
    x = torch.randn(num_tokens, 48, dtype=dtype, generator=generator)
    weight = torch.randn(64, 48, dtype=dtype, generator=generator)
    bias = torch.randn(64, dtype=dtype, generator=generator) if with_bias else None
    found = ops.banded_linear(x, weight, bias, num_bands)
    exact = F.linear(x.double(), weight.double(), None if bias is None else bias.double())
    assert found.dtype == dtype
    assert found.is_contiguous()
    tolerance = 1e-12 if dtype == torch.float64 else 1e-5
    torch.testing.assert_close(found.double(), exact, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize(
    ("tokens", "outputs", "inputs", "dtype", "banded"),
    [
        (1, 64, 48, torch.float32, True),
        (4, 64, 64, torch.float32, True),
        (5, 64, 64, torch.float32, False),  # as many inputs as outputs: few tokens only
        (8, 64, 48, torch.float64, True),
        (9, 64, 48, torch.float32, False),
        (1, 63, 48, torch.float32, False),  # cannot be cut evenly
        (1, 64, 48, torch.bfloat16, False),
        (0, 64, 48, torch.float32, False),
    ],
)
def test_bands_are_used_where_they_pay(
    tokens: int, outputs: int, inputs: int, dtype: torch.dtype, banded: bool
) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        x, weight = (
            torch.ones(tokens, inputs, dtype=dtype),
            torch.ones(outputs, inputs, dtype=dtype),
        )
        assert (ops._num_bands(x, weight) > 1) == banded
        assert linear(x, ops.dense(weight)).shape == (tokens, outputs)
    finally:
        torch.set_num_threads(before)
