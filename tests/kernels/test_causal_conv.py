"""Convolutions over steps of any rows, against torch."""

import os
import random

import pytest
import torch

from stoop.ops import causal_conv as reference
from stoop.ops.recurrent import RecurrentRows
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
@pytest.mark.parametrize("gated", [False, True], ids=["plain", "gated"])
def test_rejected_drafts_leave_the_bits_of_plain_decoding(gated: bool) -> None:
    """After any number of accepted drafts, outputs and windows are those of one token a step."""
    torch.manual_seed(0)
    drafted, plain = Decoder(gated, log_len=4), Decoder(gated, log_len=1)
    context = 0
    for accepted in (0, 1, 2, 3, 3, 0, 2):
        right = 1 + accepted
        out = drafted.step(context, right, wrong=3 - accepted)
        expected = []
        for place in range(context, context + right):
            expected.append(plain.step(place, 1))
            if place == context:  # both have folded all before this token
                assert torch.equal(drafted.state.window[0], plain.state.window[0]), context
        assert torch.equal(out, torch.cat(expected)), context
        context += right


class Decoder:
    """The convolution of one request, over steps of its text and wrong drafts."""

    def __init__(self, gated: bool, log_len: int) -> None:
        self.name, self.log_len = "gated_conv" if gated else "causal_conv", log_len
        generator = torch.Generator().manual_seed(1)
        self.text = torch.randn(30, 40 * (3 if gated else 1), generator=generator)
        self.weight = torch.randn(40, 1, 3, generator=generator)
        self.state = reference.ConvState(
            torch.full((2, 2, 40), torch.nan), torch.full((2, log_len, 40), torch.nan)
        )
        self.pending = torch.zeros(2, dtype=torch.int64)

    def step(self, context: int, right: int, wrong: int = 0) -> torch.Tensor:
        """Returns the outputs of the right tokens, which are those of the text."""
        from stoop.ops.kernels import causal_conv as kernels

        count = right + wrong
        x = self.text[context : context + count].clone()
        x[right:] = 100.0

        def number(*values: int) -> torch.Tensor:
            return torch.tensor(values, dtype=torch.int32)

        rows = RecurrentRows(
            number(0, count), number(context), number(context + count), torch.zeros(1).long(),
            self.pending, short=True,
        )  # fmt: skip
        out = getattr(kernels, self.name)(x, self.weight, None, rows, self.state)
        self.pending[0] = right
        return out[:right]


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
