"""Mamba-2 on a CUDA device: over real sizes, in graphs that serve other lengths, and drafts."""

import random
from dataclasses import replace

import pytest
import torch

from stoop.ops.mamba import MambaState, gated_norm, mamba
from support.mamba_cases import (
    Case,
    Row,
    Shape,
    Text,
    all_tensors,
    assert_right,
    copy_of,
    make_case,
    random_rows,
)

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
pytest.importorskip("triton")

BF16 = torch.bfloat16
GRANITE = Shape(heads=48, head_dim=64, state_size=128, dtype=BF16)
SHAPES = (
    GRANITE,
    Shape(heads=112, head_dim=64, state_size=128, groups=8, log_len=8, dtype=BF16),
    Shape(heads=128, head_dim=64, state_size=128, log_len=1, dtype=BF16),
    Shape(heads=24, head_dim=80, state_size=96, groups=2, log_len=3, dtype=torch.float16),
    Shape(heads=16, head_dim=64, state_size=256, dtype=BF16),
    Shape(heads=48, head_dim=64, state_size=128),
)


@pytest.fixture(autouse=True)
def _seed() -> None:
    random.seed(0)
    torch.manual_seed(0)


def limits(shape: Shape) -> dict[str, float]:
    """In half precisions, products of float32 have 16 bits."""
    limit = 5e-5 if shape.dtype == torch.float32 else 2e-4
    return {"rtol": limit, "atol": limit}


@pytest.mark.parametrize("shape", SHAPES)
def test_short_rows_equal_the_reference(shape: Shape) -> None:
    for count in (1, 5, 33):
        case = make_case(shape, random_rows(shape, count), padding=7, device="cuda")
        assert_right(case, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("shape", SHAPES)
def test_mixed_rows_equal_the_reference(shape: Shape) -> None:
    for count, longest in ((6, 100), (4, 700), (2, 2600)):
        rows = [Row(7, shape.log_len + 1, 0, 1), *random_rows(shape, count, longest)]
        assert_right(make_case(shape, rows, padding=700, device="cuda"), **limits(shape))


@pytest.mark.parametrize("length", [511, 512, 513, 1024, 1025, 1536, 1537, 2048])
def test_prompts_around_the_ends_of_segments(length: int) -> None:
    shape = replace(GRANITE, heads=8)
    rows = [Row(0, length), Row(0, 3), Row(9, length, dead=1, pending=4), Row(0, length, dead=600)]
    rows[3] = replace(rows[3], dead=min(600, length))
    assert_right(make_case(shape, rows, device="cuda"), **limits(shape))


@pytest.mark.parametrize("shape", SHAPES)
def test_drafts_leave_no_trace(shape: Shape) -> None:
    """Outputs and folded states have the bits of decoding token by token."""
    text = Text.draw(shape, requests=5, tokens=40, device="cuda")
    expected, alone = text.decode(1)
    assert expected.isfinite().all()
    for log_len in range(2, 9):
        out, state = text.decode(log_len)
        assert torch.equal(out, expected)
        assert torch.equal(state.matrix[:-1], alone.matrix[:-1])


@pytest.mark.parametrize("longest", [0, 300], ids=["short", "mixed"])
def test_a_graph_serves_other_lengths(longest: int) -> None:
    """Captured for some rows, replayed for others of the same padded counts."""
    shape, tokens, count = replace(GRANITE, heads=16), 1400, 5
    cases = [_padded(shape, random_rows(shape, count, longest), tokens, longest) for _ in range(6)]
    static = cases[0]
    state = copy_of(static.state)
    mamba.kernel(static.xbc, static.dt, static.weights, static.step, state)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = mamba.kernel(static.xbc, static.dt, static.weights, static.step, state)
    for case in cases:
        given = replace(case, weights=static.weights)
        expected_state = copy_of(case.state)
        expected = mamba.kernel(given.xbc, given.dt, given.weights, given.step, expected_state)
        _copy_into(static, case, state)
        out.fill_(torch.nan)
        graph.replay()
        assert torch.equal(out, expected)
        for ours, theirs in zip(all_tensors(state), all_tensors(expected_state), strict=True):
            assert torch.equal(ours.nan_to_num(7.0), theirs.nan_to_num(7.0))


def _padded(shape: Shape, rows: list[Row], tokens: int, longest: int) -> Case:
    used = sum(row.query_len for row in rows)
    case = make_case(shape, rows, padding=tokens - used, spare=2, device="cuda")
    return replace(case, step=replace(case.step, short=not longest))


def _copy_into(static: Case, case: Case, state: MambaState) -> None:
    static.xbc.copy_(case.xbc)
    static.dt.copy_(case.dt)
    for ours, theirs in zip(static.step.tensors, case.step.tensors, strict=True):
        ours.copy_(theirs)
    for ours, theirs in zip(all_tensors(state), all_tensors(case.state), strict=True):
        ours.copy_(theirs)


def test_slots_lie_further_apart_than_32_bits() -> None:
    """The last of 1,100 slots begins after 2^31 elements."""
    shape = replace(GRANITE, heads=8, log_len=2)
    case = make_case(shape, [Row(5, 2, pending=2), Row(5, 40, pending=1)], device="cuda")
    memory = torch.empty(1100, 2**21, device="cuda")
    matrix = memory[:, : 8 * 64 * 128].unflatten(1, (8, 64, 128))
    slots = torch.tensor([1097, 1098], device="cuda")
    pending = torch.zeros(1100, dtype=torch.int64, device="cuda")
    pending[slots] = case.step.pending[case.step.slots]
    far = [torch.zeros(1100, *each.shape[1:], device="cuda") for each in all_tensors(case.state)]
    far[0] = matrix
    for each, near in zip(far, all_tensors(case.state), strict=True):
        each[slots] = near[case.step.slots]
    state = type(case.state)(*far)
    step = replace(case.step, slots=slots, pending=pending)
    near_state = copy_of(case.state)
    expected = mamba.kernel(case.xbc, case.dt, case.weights, case.step, near_state)
    assert torch.equal(mamba.kernel(case.xbc, case.dt, case.weights, step, state), expected)
    assert torch.equal(matrix[slots], near_state.matrix[case.step.slots])


@pytest.mark.parametrize("dtype", [torch.float32, BF16, torch.float16])
@pytest.mark.parametrize(("size", "groups"), [(3072, 1), (8192, 1), (7168, 8), (16384, 1)])
def test_gated_norms_equal_torch(size: int, groups: int, dtype: torch.dtype) -> None:
    x, weight = torch.randn(2, 33, size, device="cuda").to(dtype)[0], torch.randn(size).to(dtype)
    gate = torch.randn(33, size + 40, device="cuda").to(dtype)[:, 8 : 8 + size]
    ours = gated_norm.kernel(x, gate, weight.cuda(), 1e-5, groups)
    theirs = gated_norm.reference(x, gate, weight.cuda(), 1e-5, groups)
    near = {"rtol": 1e-5, "atol": 1e-5} if dtype == torch.float32 else {"rtol": 1e-2, "atol": 1e-2}
    torch.testing.assert_close(ours, theirs, **near)
