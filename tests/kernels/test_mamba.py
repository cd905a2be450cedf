"""Mamba-2 by kernels against the reference, and drafts against decoding without them."""

import os
import random
from dataclasses import replace

import pytest
import torch

from stoop.ops.mamba import gated_norm, mamba
from support.kernel_compiling import MAX_SHARED, compile_launches
from support.mamba_cases import (
    Row,
    Shape,
    Text,
    assert_right,
    make_case,
    random_rows,
    run_kernel,
    run_reference,
)

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
EVERY = bool(os.environ.get("STOOP_TEST_ALL"))
LENGTHS = (15, 16, 17, 31, 32, 33, 64, 65, 96, 97, 128)
SHAPES = (
    Shape(heads=2, head_dim=16, state_size=32),
    Shape(heads=4, head_dim=24, state_size=40, groups=2, log_len=3),
    Shape(heads=3, head_dim=8, state_size=16, groups=3, log_len=1, dt_min=0.02, dt_max=0.1),
    Shape(heads=2, head_dim=40, state_size=64, log_len=6),
)
LIMITS = {"rtol": 1e-5, "atol": 1e-5}
SCAN_LIMITS = {"rtol": 2e-5, "atol": 2e-5}


@pytest.fixture(autouse=True)
def _seed() -> None:
    random.seed(0)
    torch.manual_seed(0)


# ---- steps ----


@pytest.mark.interpreted
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("seed", range(3 if EVERY else 1))
def test_short_rows_equal_the_reference(shape: Shape, seed: int) -> None:
    random.seed(seed)
    torch.manual_seed(seed)
    case = make_case(shape, random_rows(shape, 5), padding=seed * 2)
    assert_right(case, **LIMITS)


@pytest.mark.interpreted
@pytest.mark.parametrize("dtype", DTYPES[1:])
def test_short_rows_in_half_precision(dtype: torch.dtype) -> None:
    shape = Shape(heads=2, head_dim=16, state_size=32, dtype=dtype)
    assert_right(make_case(shape, random_rows(shape, 5), padding=3), **LIMITS)


@pytest.mark.interpreted
def test_every_number_of_pending_tokens() -> None:
    shape = SHAPES[1]
    rows = [Row(7, 1 + pending % 3, 0, pending) for pending in range(4)]
    assert_right(make_case(shape, rows), **LIMITS)


@pytest.mark.interpreted
def test_a_batch_of_padding_writes_zeros_and_nothing_else() -> None:
    shape = SHAPES[0]
    assert_right(make_case(shape, [Row(0, 0)] * 3 + [Row(0, 2, dead=2)], padding=5), **LIMITS)


@pytest.mark.interpreted
@pytest.mark.parametrize("log_len", range(2, 9) if EVERY else (2, 5, 8))
def test_drafts_leave_no_trace(log_len: int) -> None:
    """Outputs and folded states have the bits of decoding token by token."""
    text = Text.draw(Shape(heads=2, head_dim=8, state_size=16), requests=2, tokens=14)
    out, state = text.decode(log_len)
    expected, alone = text.decode(1)
    assert out.isfinite().all() and torch.equal(out, expected)
    assert torch.equal(state.matrix[:2], alone.matrix[:2])
    assert not state.matrix[2].isfinite().any()


# ---- prompts ----


@pytest.fixture
def short_segments(monkeypatch: pytest.MonkeyPatch) -> None:
    """Segments of two chunks, so that prompts of 100 tokens have several."""
    from stoop.ops.kernels import mamba_scan

    tilings = {torch.float32: mamba_scan.ScanTiling(32, 16, 16, 4, 1)}
    half = mamba_scan.ScanTiling(32, 16, 32, 4, 1)
    monkeypatch.setattr(mamba_scan, "scan_tiling", lambda dtype: tilings.get(dtype, half))


@pytest.mark.interpreted
@pytest.mark.usefixtures("short_segments")
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("seed", range(3 if EVERY else 1))
def test_mixed_rows_equal_the_reference(shape: Shape, seed: int) -> None:
    random.seed(seed)
    torch.manual_seed(seed)
    rows = [Row(1, shape.log_len + 1, pending=1), *random_rows(shape, 4, longest=110)]
    assert_right(make_case(shape, rows, padding=37 * seed), **SCAN_LIMITS)


@pytest.mark.interpreted
@pytest.mark.usefixtures("short_segments")
@pytest.mark.parametrize(
    "length", [15, 16, 17, 31, 32, 33, 64, 65, 96, 97, 128] if EVERY else [16, 17, 64, 97]
)
def test_prompts_around_the_ends_of_chunks_and_segments(length: int) -> None:
    """Beside others, so that they start inside of a segment of the batch."""
    shape = Shape(heads=1, head_dim=16, state_size=16)
    rows = [Row(0, length), Row(0, 3), Row(7, length, dead=1, pending=4), Row(0, length, dead=9)]
    assert_right(make_case(shape, rows), **SCAN_LIMITS)


@pytest.mark.interpreted
@pytest.mark.usefixtures("short_segments")
@pytest.mark.parametrize("dtype", DTYPES[1:])
def test_prompts_in_half_precision(dtype: torch.dtype) -> None:
    shape = Shape(heads=2, head_dim=24, state_size=32, dtype=dtype)
    assert_right(make_case(shape, random_rows(shape, 4, longest=100), padding=3), 1e-3, 1e-3)


# ---- the gated norm ----


@pytest.mark.interpreted
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("size", "groups"), [(64, 1), (100, 1), (600, 3), (1536, 8)])
def test_gated_norms_equal_torch(size: int, groups: int, dtype: torch.dtype) -> None:
    x, weight = torch.randn(3, size).to(dtype), torch.randn(size).to(dtype)
    gate = torch.randn(3, size + 40).to(dtype)[:, 8 : 8 + size]
    ours = gated_norm.kernel(x, gate, weight, 1e-5, groups)
    limits = LIMITS if dtype == torch.float32 else {"rtol": 2e-2, "atol": 2e-2}
    torch.testing.assert_close(ours, gated_norm.reference(x, gate, weight, 1e-5, groups), **limits)


@pytest.mark.interpreted
def test_time_steps_are_precise_where_they_are_small() -> None:
    shape = Shape(heads=2, head_dim=8, state_size=16)
    case = make_case(shape, [Row(0, 4)])
    for shift in (-12.0, -6.0, 0.0, 12.0, 40.0):
        case.dt.fill_(shift)
        _, state = run_kernel(case)
        _, exact = run_reference(case)
        logged = state.input_log[case.step.slots].double()
        torch.testing.assert_close(logged, exact.input_log[case.step.slots], rtol=3e-6, atol=0)


# ---- compiled ----

GRANITE = Shape(heads=48, head_dim=64, state_size=128)
BAMBA = Shape(heads=128, head_dim=64, state_size=128)
SCAN_SPILLS = 400  # bytes: what Triton computes before the loop, such as descriptors of operands
NEMOTRON = Shape(heads=112, head_dim=64, state_size=128, groups=8)


@pytest.mark.parametrize("dtype", DTYPES[:2])
@pytest.mark.parametrize("log_len", [1, 4, 8])
@pytest.mark.parametrize("shape", [GRANITE, BAMBA, NEMOTRON], ids=lambda s: f"{s.heads} heads")
def test_steps_compile_for_an_h200(shape: Shape, log_len: int, dtype: torch.dtype) -> None:
    shape = replace(shape, log_len=log_len, dtype=dtype)
    case = make_case(shape, [Row(3, 1)])
    with compile_launches() as found:
        mamba.kernel(case.xbc, case.dt, case.weights, case.step, case.state)
    (compiled,) = found
    print(compiled)
    assert compiled.spilled == 0 and compiled.registers <= 168  # 12 programs on an SM


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [GRANITE, BAMBA, NEMOTRON], ids=lambda s: f"{s.heads} heads")
def test_scans_compile_for_an_h200(shape: Shape, dtype: torch.dtype) -> None:
    case = make_case(replace(shape, dtype=dtype), [Row(0, 1100)])
    with compile_launches() as found:
        mamba.kernel(case.xbc, case.dt, case.weights, case.step, case.state)
    names = [each.kernel for each in found[1:]]
    assert names == ["_decay_kernel", "_scan_kernel", "_pass_kernel", "_scan_kernel"]
    for compiled in found[1:]:
        print(compiled)
        assert compiled.shared <= MAX_SHARED and compiled.spilled <= SCAN_SPILLS


@pytest.mark.parametrize("dtype", DTYPES[:2])
@pytest.mark.parametrize(("size", "groups"), [(3072, 1), (8192, 1), (7168, 8), (16384, 1)])
def test_gated_norms_compile_for_an_h200(size: int, groups: int, dtype: torch.dtype) -> None:
    x = torch.zeros(2, size, dtype=dtype)
    with compile_launches() as found:
        gated_norm.kernel(x, x, x[0], 1e-5, groups)
    (compiled,) = found
    print(compiled)
    assert compiled.shared <= MAX_SHARED and compiled.spilled == 0
