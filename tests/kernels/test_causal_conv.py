"""Convolutions over steps of any rows, against torch."""

import os
import random

import pytest
import torch

from stoop.ops import causal_conv as reference
from support.kernel_compiling import MAX_SHARED, compile_launches
from support.recurrent_cases import Row, check_state, copied, make_conv, make_rows, random_rows

EVERY = bool(os.environ.get("STOOP_TEST_ALL"))
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def limits(dtype: torch.dtype, wider: float = 1) -> dict[str, float]:
    limit = 1e-5 if dtype == torch.float32 else 2e-2
    return {"rtol": limit, "atol": limit * wider}


@pytest.mark.interpreted
@pytest.mark.parametrize("seed", range(12 if EVERY else 4))
@pytest.mark.parametrize("gated", [False, True], ids=["plain", "gated"])
@pytest.mark.parametrize("short", [False, True], ids=["any", "short"])
def test_convolutions_equal_torch(short: bool, gated: bool, seed: int) -> None:
    from stoop.ops.kernels import causal_conv as kernels

    rng = random.Random(seed)
    torch.manual_seed(seed)
    dtype, width, log_len = rng.choice(DTYPES), rng.choice((2, 3, 4)), rng.choice((1, 2, 4, 7))
    rows, num_tokens = random_rows(rng, log_len, short=short, longest=90)
    case = make_conv(
        rows, num_tokens, rng.choice((8, 300)), width, log_len, dtype,
        gated=gated, bias=rng.random() < 0.5,
    )  # fmt: skip
    theirs, before = copied(case.state), copied(case.state)
    name = "gated_conv" if gated else "causal_conv"
    expected = getattr(reference, name).reference(case.x, case.weight, case.bias, rows, theirs)
    out = getattr(kernels, name)(case.x, case.weight, case.bias, rows, case.state)
    cut = gated and dtype == torch.bfloat16  # the interpreter cuts off where a GPU rounds
    torch.testing.assert_close(out, expected, **limits(dtype, wider=10 if cut else 1))
    kept_limit = 1e-2 if cut else 0
    check_state(case.state, theirs, before, rows, rtol=kept_limit, atol=kept_limit)


@pytest.mark.interpreted
def test_padding_alone_touches_nothing() -> None:
    from stoop.ops.kernels import causal_conv as kernels

    for given in ([Row(0, 0)] * 3, [Row(2, 0)] * 3):
        rows, num_tokens = make_rows(given, 2, random.Random(0), extra_tokens=9)
        case = make_conv(rows, num_tokens, 40, 4, 2, torch.float32, gated=False)
        before = copied(case.state)
        out = kernels.causal_conv(case.x, case.weight, case.bias, rows, case.state)
        assert not out.any()
        check_state(case.state, before, before, rows)


@pytest.mark.parametrize("short", [False, True], ids=["any", "short"])
@pytest.mark.parametrize("dtype", DTYPES[:2])
@pytest.mark.parametrize(
    ("name", "channels", "width", "log_len"),
    [
        ("causal_conv", 6144, 4, 1),
        ("causal_conv", 6144, 4, 4),
        ("causal_conv", 8192, 4, 8),
        ("gated_conv", 2048, 3, 4),
    ],
)
def test_convolutions_compile_for_an_h200(
    name: str,
    channels: int,
    width: int,
    log_len: int,
    dtype: torch.dtype,
    short: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from stoop.ops.kernels import causal_conv as kernels

    rows, num_tokens = make_rows([Row(log_len + (not short), 1)], log_len, random.Random(0))
    gated = name == "gated_conv"
    case = make_conv(rows, num_tokens, channels, width, log_len, dtype, gated=gated)
    for programs in (kernels.MANY_PROGRAMS, 1):  # more, and so fewer warps, for larger batches
        monkeypatch.setattr(kernels, "MANY_PROGRAMS", programs)
        with compile_launches() as found:
            getattr(kernels, name)(case.x, case.weight, None, rows, case.state)
        (compiled,) = found
        print(compiled)
        assert compiled.shared <= MAX_SHARED and compiled.spilled == 0
