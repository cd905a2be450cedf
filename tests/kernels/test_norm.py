"""RMSNorm and the gated activation against torch."""

import pytest
import torch

from stoop.ops import norm as reference
from support.kernel_compiling import MAX_SHARED, compile_launches

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
# Of inputs and of norm weights, which may be wider.
NORM_DTYPES = (*((dtype, dtype) for dtype in DTYPES), (torch.bfloat16, torch.float32))
SIZES = (64, 100, 576, 4096)


def tolerances(dtype: torch.dtype) -> dict[str, float]:
    return {"rtol": 1e-5, "atol": 1e-6} if dtype == torch.float32 else {"rtol": 2e-2, "atol": 2e-2}


@pytest.mark.interpreted
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", SIZES[:3])
def test_norms_equal_torch(size: int, dtype: torch.dtype) -> None:
    from stoop.ops.kernels import norm as kernels

    torch.manual_seed(size)
    x = torch.randn(5, size).to(dtype)
    weight = torch.rand(size).to(dtype)
    ours, theirs = kernels.rms_norm(x, weight, 1e-5), reference.rms_norm(x, weight, 1e-5)
    torch.testing.assert_close(ours, theirs, **tolerances(dtype))


@pytest.mark.interpreted
@pytest.mark.parametrize("dtype", DTYPES)
def test_joined_norms_equal_torch(dtype: torch.dtype) -> None:
    """Also of parts that are views with rows apart."""
    from stoop.ops.kernels import norm as kernels

    taps = torch.randn(5, 3, 100).to(dtype)
    weights = list(torch.rand(3, 100).to(dtype))
    parts = taps.unbind(dim=1)
    torch.testing.assert_close(
        kernels.join_norms(parts, weights, 1e-5),
        reference.join_norms(parts, weights, 1e-5),
        **tolerances(dtype),
    )


@pytest.mark.interpreted
@pytest.mark.parametrize(("dtype", "weight_dtype"), NORM_DTYPES)
def test_joined_embeddings_equal_torch(dtype: torch.dtype, weight_dtype: torch.dtype) -> None:
    from stoop.ops.kernels import norm as kernels

    table, features = torch.randn(9, 100).to(dtype), torch.randn(5, 2, 100).to(dtype)[:, 1]
    norms = torch.rand(2, 100).to(weight_dtype)
    token_ids = torch.tensor([8, 0, 3, 3, 1], dtype=torch.int32)
    arguments = (token_ids, table, norms[0], features, norms[1], 1e-5)
    torch.testing.assert_close(
        kernels.join_embedded(*arguments),
        reference.join_norms((table[token_ids.long()], features), tuple(norms), 1e-5),
        **tolerances(dtype),
    )


@pytest.mark.interpreted
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [64, 576, 2100])
def test_embeddings_are_looked_up(size: int, dtype: torch.dtype) -> None:
    from stoop.ops.kernels import embedding as kernels

    table = torch.randn(9, size).to(dtype)
    token_ids = torch.tensor([8, 0, 3, 3, 1], dtype=torch.int32)
    assert torch.equal(kernels.embed(token_ids, table), table[token_ids.long()])


@pytest.mark.interpreted
@pytest.mark.parametrize(("dtype", "weight_dtype"), NORM_DTYPES)
@pytest.mark.parametrize("index", [None, [], [5], [5, 0, 5, 2]])
def test_taken_rows_are_kept_and_normalised(
    index: list[int] | None, dtype: torch.dtype, weight_dtype: torch.dtype
) -> None:
    """Zeros follow them, whatever stood there."""
    from stoop.ops.kernels import norm as kernels

    x, weight = torch.randn(6, 1100).to(dtype), torch.rand(1100).to(weight_dtype)
    chosen = None if index is None else torch.tensor(index, dtype=torch.int64)
    expected = x if chosen is None else x[chosen]
    out = torch.full((8, 1100), 7.0, dtype=dtype)
    normed = kernels.take_and_norm(x, chosen, out, weight, 1e-5)
    assert torch.equal(out[: len(expected)], expected)
    assert not out[len(expected) :].any()
    torch.testing.assert_close(
        normed, reference.rms_norm(expected, weight, 1e-5), **tolerances(dtype)
    )


@pytest.mark.interpreted
@pytest.mark.parametrize("dtype", DTYPES)
def test_silu_and_mul_equals_torch(dtype: torch.dtype) -> None:
    from stoop.ops.kernels import norm as kernels

    gate_up = torch.randn(3, 2 * 300).to(dtype)
    torch.testing.assert_close(
        kernels.silu_and_mul(gate_up), reference.silu_and_mul(gate_up), **tolerances(dtype)
    )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", SIZES)
def test_norms_compile_for_an_h200(size: int, dtype: torch.dtype) -> None:
    from stoop.ops.kernels import norm as kernels
    from stoop.ops.kernels.embedding import embed

    x = torch.zeros(4, size, dtype=dtype)
    token_ids = torch.zeros(4, dtype=torch.int32)
    with compile_launches() as found:
        embed(token_ids, x)
        kernels.rms_norm(x, x[0], 1e-5)
        kernels.silu_and_mul(torch.zeros(4, 2 * size, dtype=dtype))
        kernels.join_embedded(token_ids, x, x[0], x, x[0], 1e-5)
        for index in (None, torch.zeros(4, dtype=torch.int64)):
            kernels.take_and_norm(x, index, torch.zeros_like(x), x[0], 1e-5)
        wide = x[0].float()
        kernels.join_embedded(token_ids, x, wide, x, wide, 1e-5)
        kernels.take_and_norm(x, None, torch.zeros_like(x), wide, 1e-5)
    assert len(found) == 8
    for compiled in found:
        print(compiled)
        assert compiled.shared <= MAX_SHARED and compiled.spilled == 0
