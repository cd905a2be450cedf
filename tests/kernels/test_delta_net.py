"""The gated delta rule over steps of any rows, against torch."""

import itertools
import os
import random

import pytest
import torch

from stoop.ops import delta_net as reference
from support.kernel_compiling import MAX_SHARED, compile_launches
from support.recurrent_cases import (
    DeltaShape,
    Row,
    check_state,
    copied,
    make_delta,
    make_rows,
    random_rows,
)
from support.recurrent_decoding import check_decoding, make_text

SHAPES = (DeltaShape(2, 2, 16, 16), DeltaShape(1, 3, 32, 64), DeltaShape(2, 4, 16, 32))
SPILLED = {
    ("scan_kernel", torch.bfloat16): 160,
    ("scan_kernel", torch.float16): 160,
    ("scan_kernel", torch.float32): 2048,
    ("prepare_kernel", torch.bfloat16): 96,
    ("prepare_kernel", torch.float16): 96,
    ("prepare_kernel", torch.float32): 1280,
}
OUT = {torch.float32: 2e-4, torch.bfloat16: 3e-2, torch.float16: 5e-3}

EVERY = bool(os.environ.get("STOOP_TEST_ALL"))


@pytest.mark.interpreted
@pytest.mark.parametrize("seed", range(16 if EVERY else 5))
@pytest.mark.parametrize("short", [False, True], ids=["any", "short"])
def test_steps_equal_torch(short: bool, seed: int) -> None:
    from stoop.ops.kernels import delta_net as kernels

    rng = random.Random(seed)
    torch.manual_seed(seed)
    dtype, log_len = rng.choice(tuple(OUT)), rng.choice((1, 2, 4, 7))
    rows, num_tokens = random_rows(rng, log_len, short=short, longest=200)
    case = make_delta(rows, num_tokens, rng.choice(SHAPES), log_len, dtype)
    theirs, before = copied(case), copied(case)
    expected = reference.delta_net.reference(*theirs.arguments)
    out = kernels.delta_net(*case.arguments)
    torch.testing.assert_close(out, expected, rtol=OUT[dtype], atol=OUT[dtype])
    check_state(case.state, theirs.state, before.state, rows, rtol=2e-5, atol=2e-5)


@pytest.mark.interpreted
def test_prompts_around_the_ends_of_chunks() -> None:
    from stoop.ops.kernels import delta_net as kernels

    torch.manual_seed(0)
    given = [Row(n, n, 9 * (n % 2), n % 2) for n in (63, 64, 65, 127, 128, 129)]
    rows, num_tokens = make_rows(given, 2, random.Random(0))
    case = make_delta(rows, num_tokens, SHAPES[0], 2, torch.float32)
    theirs, before = copied(case), copied(case)
    expected = reference.delta_net.reference(*theirs.arguments)
    torch.testing.assert_close(kernels.delta_net(*case.arguments), expected, rtol=2e-4, atol=2e-4)
    check_state(case.state, theirs.state, before.state, rows, rtol=2e-5, atol=2e-5)


SMALL, LARGE = DeltaShape(16, 16, 128, 128), DeltaShape(16, 32, 128, 128)
COMPILED = [
    (SMALL, torch.bfloat16, False),
    (SMALL, torch.float32, True),
    (LARGE, torch.float16, True),
    (LARGE, torch.float32, False),
]
if EVERY:
    dtypes = (torch.bfloat16, torch.float16, torch.float32)
    COMPILED = list(itertools.product((SMALL, LARGE), dtypes, (False, True)))


@pytest.mark.parametrize(("shape", "dtype", "short"), COMPILED)
def test_steps_compile_for_an_h200(shape: DeltaShape, dtype: torch.dtype, short: bool) -> None:
    from stoop.ops.kernels import delta_net as kernels

    rows, num_tokens = make_rows([Row(4 + (not short), 1)], 4, random.Random(0))
    case = make_delta(rows, num_tokens, shape, 4, dtype)
    with compile_launches() as found:
        kernels.delta_net(*case.arguments)
    names = [] if short else ["prepare_kernel", "scan_kernel"]
    assert [each.kernel for each in found] == [*names, "step_kernel", "finish_kernel"]
    assert found[-2].signals_late  # the last one relies on it
    for compiled in found:
        print(compiled)
        assert compiled.shared <= MAX_SHARED
        # Products of float32 in three passes take more registers than there are.
        assert compiled.spilled <= SPILLED.get((compiled.kernel, dtype), 0)


@pytest.mark.interpreted
@pytest.mark.parametrize("log_len", [1, 2, 3, 5, 8] if EVERY else [2, 5])
def test_rejected_drafts_leave_the_bits_of_plain_decoding(log_len: int) -> None:
    torch.manual_seed(log_len)
    text = make_text(DeltaShape(1, 2, 16, 32), 3, 14, torch.float32)
    check_decoding(text, log_len, random.Random(log_len))


@pytest.mark.interpreted
def test_padding_alone_touches_nothing() -> None:
    from stoop.ops.kernels import delta_net as kernels

    for given in ([Row(0, 0)] * 3, [Row(2, 0)] * 3, [Row(9, 0)] * 2):
        rows, num_tokens = make_rows(given, 2, random.Random(0), extra_tokens=70)
        case = make_delta(rows, num_tokens, SHAPES[0], 2, torch.float32)
        before = copied(case.state)
        assert not kernels.delta_net(*case.arguments).any()
        check_state(case.state, before, before, rows)


@pytest.mark.interpreted
def test_equal_keys_that_are_not_forgotten() -> None:
    """The triangular system is then as hard to solve as it gets: its powers overflow."""
    from stoop.ops.kernels import delta_net as kernels

    torch.manual_seed(0)
    rows, num_tokens = make_rows([Row(200, 200, 3, 1)], 1, random.Random(0))
    case = make_delta(rows, num_tokens, DeltaShape(1, 1, 16, 16), 1, torch.float32)
    case.qkv[:, 16:32] = case.qkv[:1, 16:32]
    case.gates.b.fill_(8.0)
    case.weights.a_log.fill_(-20.0)
    theirs = copied(case)
    expected = reference.delta_net.reference(*theirs.arguments)
    torch.testing.assert_close(kernels.delta_net(*case.arguments), expected, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(case.state.matrix, theirs.state.matrix, equal_nan=True)


def test_other_sizes_are_refused() -> None:
    from stoop.ops.kernels import delta_net as kernels

    rows, num_tokens = make_rows([Row(1, 1)], 1, random.Random(0))
    case = make_delta(rows, num_tokens, DeltaShape(1, 1, 24, 16), 1, torch.float32)
    with pytest.raises(AssertionError, match="key_dim 24"):
        kernels.delta_net(*case.arguments)
