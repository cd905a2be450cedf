"""Products with packed matrices: inputs are rounded to 16 or 8 bits, the rest is float32, and a
row's result depends on that row alone."""

import dataclasses

import pytest
import torch
from torch import Tensor

from stoop.ops.native.library import Native
from stoop.ops.norm import rms_norm, silu_and_mul
from stoop.ops.packed import with_input_bits
from support.packed_models import EVERY_FORMAT, Matrix, make_matrix

pytestmark = pytest.mark.usefixtures("native")

EPS = 1e-5
COUNTS = (*range(1, 21), *range(63, 71))
UNIT = 2.0**-24  # of rounding in float32
Kinds = list[str]


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def assert_exact(ours: Tensor, matrix: Matrix, x: Tensor, bias: Tensor | None = None) -> None:
    """Within the rounding of a sum of so many numbers in float32, and of inputs to 16 bits."""
    exact = x.double() @ matrix.dense.double().T
    magnitude = matrix.magnitude(x)
    rounding = matrix.magnitude(half_steps(x))
    if bias is not None:
        exact, magnitude = exact + bias.double(), magnitude + bias.double().abs()
    steps = x.shape[1] // 8 + 8  # far below one for every addition, as errors cancel out
    assert ours.dtype == torch.float32
    limit = rounding + steps * UNIT * magnitude + 1e-30
    assert bool(((ours.double() - exact).abs() <= limit).all())


def half_steps(x: Tensor) -> Tensor:
    """The most that each input may be rounded by: half a step, 32767 to the largest of its 32."""
    largest = x.reshape(x.shape[0], -1, 32).abs().amax(dim=-1)
    return (0.5001 * largest / 32767).repeat_interleave(32, dim=1)


def assert_near(ours: Tensor, exact: Tensor) -> None:
    """Of silu(gate) * up: what rounding to 16 bits does to the largest result."""
    assert float((ours.double() - exact).abs().max()) <= 1e-4 * float(exact.abs().max())


@pytest.fixture(scope="module", params=EVERY_FORMAT, ids="+".join)
def matrix(request: pytest.FixtureRequest) -> Matrix:
    """160 or more outputs: groups of 6 and of 4 tiles, and what is left over."""
    kinds: Kinds = request.param
    return make_matrix(kinds, 176 if len(kinds) == 1 else 96, 256, seed=5)


def test_every_number_of_rows(matrix: Matrix) -> None:
    """Right, and each row the same to the bit whatever the others are, in any order."""
    x, bias = random(70, 256), random(matrix.dense.shape[0], seed=1)
    alone = torch.cat([matrix.scheme.linear(row[None], matrix.weight, bias) for row in x])
    assert_exact(alone, matrix, x, bias)
    for count in COUNTS:
        assert torch.equal(matrix.scheme.linear(x[:count], matrix.weight, bias), alone[:count])
    assert torch.equal(matrix.scheme.linear(x.flip(0), matrix.weight, bias), alone.flip(0))


def in_8_bits(matrix: Matrix) -> Matrix:
    scheme = with_input_bits(matrix.scheme, 8)
    assert scheme.input_bits == 8 and matrix.scheme.input_bits == 16
    return dataclasses.replace(matrix, weight=matrix.weight._replace(scheme=scheme))


def rounded(x: Tensor) -> Tensor:
    """Inputs as 8 bits hold them: whole numbers up to 127, a scale for every 32."""
    grouped = x.reshape(x.shape[0], -1, 32)
    largest = grouped.abs().amax(dim=-1, keepdim=True)
    codes = (grouped * (127 / largest.clamp_min(1e-30))).round()
    return (codes.double() * (largest / 127).double()).reshape(x.shape)


def test_inputs_of_8_bits(matrix: Matrix) -> None:
    """As exact as float32 for the rounded inputs, the same for any number of rows and threads."""
    matrix, x = in_8_bits(matrix), random(70, 256)
    x[:, 32:64] *= 100  # groups have scales of their own
    x[3, :32] = 0
    bias = random(matrix.dense.shape[0], seed=1)
    scheme, weight = matrix.weight.scheme, matrix.weight
    alone = torch.cat([scheme.linear(row[None], weight, bias) for row in x])
    exact = rounded(x) @ matrix.dense.double().T + bias.double()
    magnitude = matrix.magnitude(rounded(x)) + bias.double().abs()
    limit = (x.shape[1] // 8 + 8) * UNIT * magnitude
    assert bool(((alone.double() - exact).abs() <= limit).all())
    plain = x.double() @ matrix.dense.double().T + bias.double()
    assert float((alone.double() - plain).abs().max()) > 100 * float(limit.max()), "not rounded"
    for num_threads in (1, 2, 3):
        torch.set_num_threads(num_threads)
        for count in COUNTS:
            assert torch.equal(scheme.linear(x[:count], weight, bias), alone[:count])


def test_inputs_of_8_bits_with_norms_and_gates(matrix: Matrix) -> None:
    matrix, x, norm = in_8_bits(matrix), random(11, 256), 1 + random(256, seed=1)
    scheme, weight = matrix.weight.scheme, matrix.weight
    normed = rounded(rms_norm(x, norm, EPS))
    exact = normed @ matrix.dense.double().T
    ours = scheme.norm_linear(x, norm, EPS, weight, None)
    # A number halfway between two steps may be rounded either way.
    assert float((ours.double() - exact).abs().quantile(0.9)) < 1e-4
    gated = scheme.norm_linear_silu(x, norm, EPS, weight, None)
    expected = silu_and_mul(ours)
    torch.testing.assert_close(gated, expected, rtol=1e-5, atol=1e-5)
    ids = torch.arange(matrix.dense.shape[0])
    assert torch.equal(scheme.embed(ids, weight, torch.float32), matrix.dense)


@pytest.mark.parametrize("kinds", EVERY_FORMAT, ids="+".join)
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_8_bits_of_what_is_not_finite(kinds: Kinds, value: float) -> None:
    matrix = in_8_bits(make_matrix(kinds, 32, 256))
    scheme, x = matrix.weight.scheme, random(9, 256)
    clean = scheme.linear(x, matrix.weight, None)
    x[2, 100] = value
    ours = scheme.linear(x, matrix.weight, None)
    others = [0, 1, *range(3, 9)]
    assert bool(ours[2].isnan().all()) and torch.equal(ours[others], clean[others])


def test_every_number_of_threads(matrix: Matrix) -> None:
    x, norm = random(9, 256), random(256, seed=1).abs()
    outputs = []
    for num_threads in (1, 2, 3, 1):
        torch.set_num_threads(num_threads)
        parts = [matrix.scheme.linear(x[:n], matrix.weight, None) for n in (1, 2, 9)]
        parts.append(matrix.scheme.norm_linear_silu(x, norm, EPS, matrix.weight, None))
        outputs.append(parts)
    for other in outputs[1:]:
        assert all(map(torch.equal, outputs[0], other))


def test_with_a_norm(matrix: Matrix) -> None:
    x, norm, bias = random(11, 256), 1 + random(256, seed=1), random(matrix.dense.shape[0], seed=2)
    ours = matrix.scheme.norm_linear(x, norm, EPS, matrix.weight, bias)
    normed = rms_norm(x.double(), norm.double(), EPS)
    assert_exact(ours, matrix, normed, bias)
    alone = [matrix.scheme.norm_linear(row[None], norm, EPS, matrix.weight, bias) for row in x]
    assert torch.equal(ours, torch.cat(alone))


def test_gated(matrix: Matrix) -> None:
    """silu of the first half, times the second half."""
    x, norm, bias = random(11, 256), 1 + random(256, seed=1), random(matrix.dense.shape[0], seed=2)
    ours = matrix.scheme.norm_linear_silu(x, norm, EPS, matrix.weight, bias)
    normed = rms_norm(x.double(), norm.double(), EPS)
    exact = silu_and_mul(normed @ matrix.dense.double().T + bias.double())
    assert_near(ours, exact)
    alone = [matrix.scheme.norm_linear_silu(r[None], norm, EPS, matrix.weight, bias) for r in x]
    assert torch.equal(ours, torch.cat(alone))


def test_gated_with_an_odd_number_of_tiles() -> None:
    matrix = make_matrix(["Q4_0"], 48, 64)
    x, norm = random(3, 64), torch.ones(64)
    ours = matrix.scheme.norm_linear_silu(x, norm, EPS, matrix.weight, None)
    exact = silu_and_mul(rms_norm(x.double(), norm.double(), EPS) @ matrix.dense.double().T)
    assert_near(ours, exact)


def test_onto_a_stream(matrix: Matrix) -> None:
    x, stream = random(5, 256), random(5, matrix.dense.shape[0], seed=1)
    before = stream.clone()
    ours = matrix.scheme.linear_add(
        x, matrix.weight, None, stream, keep=True, prefetch_weight=False
    )
    assert torch.equal(ours, before + matrix.scheme.linear(x, matrix.weight, None))
    assert torch.equal(stream, before)


def test_rows_are_looked_up_exactly(matrix: Matrix) -> None:
    num_rows = matrix.dense.shape[0]
    for ids in (torch.arange(num_rows), torch.tensor([5, 5, 0, num_rows - 1], dtype=torch.int32)):
        found = matrix.scheme.embed(ids, matrix.weight, torch.float32)
        assert torch.equal(found, matrix.dense[ids.long()])
    outside = torch.tensor([-1, num_rows, 1 << 40])  # padding
    assert not matrix.scheme.embed(outside, matrix.weight, torch.float32).any()


@pytest.mark.parametrize("kinds", EVERY_FORMAT, ids="+".join)
def test_extreme_scales(kinds: Kinds) -> None:
    """Zeros, subnormal, negative and the largest numbers of float16."""
    matrix = make_matrix(kinds, 32, 256, seed=7, extreme=True)
    x = random(3, 256)
    assert_exact(matrix.scheme.linear(x, matrix.weight, None), matrix, x)
    ids = torch.arange(matrix.dense.shape[0])
    assert torch.equal(matrix.scheme.embed(ids, matrix.weight, torch.float32), matrix.dense)


def test_inputs_that_are_not_contiguous() -> None:
    matrix = make_matrix(["Q4_1"], 32, 64)
    wide = random(6, 200)
    views = {
        "columns of a wider matrix": wide[:, 3:67],
        "every second row": wide[::2, :64],
        "every second column": wide[:, :128:2],
        "transposed": random(64, 6).T,
        "one row repeated": wide[:1, :64].expand(4, 64),
    }
    for name, x in views.items():
        ours = matrix.scheme.linear(x, matrix.weight, None)
        assert torch.equal(ours, matrix.scheme.linear(x.contiguous(), matrix.weight, None)), name
        assert_exact(ours, matrix, x)


def test_a_part_of_a_matrix() -> None:
    """q, k and v lie in one matrix and can be multiplied apart."""
    matrix = make_matrix(["Q4_0", "Q8_0"], 32, 64)
    x = random(4, 64)
    whole = matrix.scheme.linear(x, matrix.weight, None)
    for start in (0, 16, 32):
        part = matrix.weight.rows(start, 32)
        assert torch.equal(part.scheme.linear(x, part, None), whole[:, start : start + 32])


def test_no_rows() -> None:
    matrix = make_matrix(["Q4_0"], 32, 64)
    assert matrix.scheme.linear(torch.empty(0, 64), matrix.weight, None).shape == (0, 32)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_other_dtypes_have_a_slow_path(dtype: torch.dtype) -> None:
    matrix = make_matrix(["Q4_1"], 32, 64)
    x = random(3, 64).to(dtype)
    ours = matrix.scheme.linear(x, matrix.weight, None)
    assert ours.dtype == dtype
    assert torch.equal(ours, x @ matrix.dense.to(dtype).T)
    ids = torch.tensor([3, 1])
    assert torch.equal(matrix.scheme.embed(ids, matrix.weight, dtype), matrix.dense[ids].to(dtype))


def test_without_kernels_torch_computes_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    matrix, x, norm = make_matrix(["Q4_0", "Q4_1"], 32, 64), random(3, 64), torch.ones(64)
    ours = matrix.scheme.norm_linear_silu(x, norm, EPS, matrix.weight, None)
    monkeypatch.setattr("stoop.ops.packed.find_native", lambda: None)
    theirs = matrix.scheme.norm_linear_silu(x, norm, EPS, matrix.weight, None)
    assert_near(ours, theirs.double())


def test_another_default_dtype_changes_nothing() -> None:
    """Results are float32 whatever `torch.set_default_dtype` says."""
    matrix, x = make_matrix(["Q4_0"], 32, 64), random(3, 64)
    expected = matrix.scheme.linear(x, matrix.weight, None)
    torch.set_default_dtype(torch.float64)
    try:
        ours = matrix.scheme.linear(x, matrix.weight, None)
        found = matrix.scheme.embed(torch.tensor([2]), matrix.weight, torch.float32)
    finally:
        torch.set_default_dtype(torch.float32)
    assert ours.dtype == found.dtype == torch.float32
    assert torch.equal(ours, expected) and torch.equal(found, matrix.dense[[2]])


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_what_is_not_finite_stays_so_and_in_its_row(matrix: Matrix, value: float) -> None:
    x, norm = random(5, 256), torch.ones(256)
    clean = matrix.scheme.linear(x, matrix.weight, None)
    gated = matrix.scheme.norm_linear_silu(x, norm, EPS, matrix.weight, None)
    x[2, 100] = value
    ours = matrix.scheme.linear(x, matrix.weight, None)
    theirs = x @ matrix.dense.T
    assert bool((theirs[2].isfinite() == ours[2].isfinite()).all())
    assert bool(ours[2][theirs[2].isnan()].isnan().all())
    others = [0, 1, 3, 4]
    assert torch.equal(ours[others], clean[others])
    # The norm of a row that is not finite is not finite, in every output.
    dirty = matrix.scheme.norm_linear_silu(x, norm, EPS, matrix.weight, None)
    assert bool(dirty[2].isnan().all()) and torch.equal(dirty[others], gated[others])


def test_silu_of_large_and_strange_numbers() -> None:
    """A matrix that copies its input to gate and up."""
    from stoop.ops.packed import Q8_0, Groups

    codes = torch.zeros(64, 32, dtype=torch.int8)
    codes[torch.arange(64), torch.arange(64) % 32] = 1
    weight = Q8_0.empty(64, 32, torch.float32)
    weight.data.copy_(Q8_0.pack(Groups(codes, torch.ones(64, 1).half(), None)))
    for value in (0.0, -0.0, 1e-8, -20.0, -87.0, -88.5, -1000.0, 20.0, 88.5, 1000.0, 1e18):
        x = torch.full((1, 32), value)
        # A norm that undoes itself: x / |x| * |x|
        norm = torch.full((32,), abs(value)) if value else torch.ones(32)
        ours = Q8_0.norm_linear_silu(x, norm, 0.0 if value else EPS, weight, None).double()
        given = rms_norm(x, norm, 0.0 if value else EPS).double()
        exact = torch.nn.functional.silu(given) * given
        torch.testing.assert_close(ours, exact, rtol=1e-5, atol=1e-30)


def test_sums_belong_to_their_input(native: Native) -> None:
    """Formats with minima need sums of the input; calls share the memory that holds them."""
    small, large = make_matrix(["Q4_1"], 32, 64), make_matrix(["Q4_K"], 32, 512)
    x, wide = random(3, 64), random(70, 512, seed=1)
    first = small.scheme.linear(x, small.weight, None)
    large.scheme.linear(wide, large.weight, None)
    again = small.scheme.linear(x, small.weight, None)
    assert torch.equal(first, again)
    assert_exact(small.scheme.linear(-x, small.weight, None), small, -x)
