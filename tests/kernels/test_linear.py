"""Products of few tokens, with norm, gate and residual, against float64."""

import itertools
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from support.kernel_compiling import MAX_SHARED, compile_launches
from support.linear_cases import EPS, KINDS, assert_right, limit_of, make_case

EVERY = bool(os.environ.get("STOOP_TEST_ALL"))
DTYPES = (torch.bfloat16, torch.float16)
STACK = 16  # bytes: some kernels of one warp have a few, of no weight
# Rows and inputs that no block divides; 8 and 100 inputs have rows that are not whole 16 bytes.
SIZES = ((44, 200), (6, 100), (34, 8))


def tilings(tokens: int) -> Iterator[Any]:
    from stoop.ops.kernels.linear_choice import GemmTiling

    yield GemmTiling(16, 4, 16, 4, 2)  # several blocks of inputs, in ways
    yield GemmTiling(32, 1, 32, 1, 2)  # in one way
    yield GemmTiling(8, 2, 128, 2, 1)  # all inputs at once
    if tokens > 8:  # in several programs
        yield GemmTiling(16, 4, 16, 4, 2, tokens=8)
        yield GemmTiling(8, 2, 128, 2, 1, tokens=16)
    if tokens <= 4:
        yield GemmTiling(4, 1, 64, 4, 1, dot=False)
        yield GemmTiling(2, 1, 256, 4, 1, dot=False)


def products() -> Iterator[tuple[int, str, torch.dtype]]:
    """Every kind with every number of tokens; dtypes take turns."""
    turn = itertools.cycle(DTYPES)  # an odd number of kinds: each meets both dtypes
    for tokens, kind in itertools.product((1, 3, 4, 8, 17), KINDS):
        for dtype in DTYPES if EVERY else (next(turn),):
            yield tokens, kind, dtype


@pytest.mark.interpreted
@pytest.mark.parametrize(("tokens", "kind", "dtype"), list(products()))
def test_products_equal_float64(tokens: int, kind: str, dtype: torch.dtype) -> None:
    torch.manual_seed(tokens)
    for size in SIZES:
        for tiling in tilings(tokens):
            case = make_case(kind, tokens, size, dtype, bias=size == SIZES[0])
            assert_right(case.run(tiling), case.exact(), limit_of(dtype))


@pytest.mark.interpreted
@pytest.mark.parametrize("kind", KINDS)
def test_many_tokens_in_parts_equal_float64(kind: str) -> None:
    from stoop.ops.kernels.linear_choice import GemmTiling

    torch.manual_seed(0)
    case = make_case(kind, 100, SIZES[0], torch.bfloat16, bias=True)
    assert_right(case.run(GemmTiling(16, 2, 64, 4, 1, tokens=16)), case.exact(), 2e-2)


@pytest.mark.interpreted
def test_operations_equal_float64() -> None:
    from stoop.ops.kernels import linear as kernels

    torch.manual_seed(0)
    linear, add, norm, gated, alone = (
        make_case(kind, 3, (44, 200), torch.bfloat16, bias=True) for kind in KINDS
    )
    results = (
        (linear, kernels.skinny_linear(linear.x, linear.weight, linear.bias)),
        (add, kernels.linear_add(add.x, add.weight, add.bias, add.residual)),
        (norm, kernels.norm_linear(norm.x, norm.norm, EPS, norm.weight, norm.bias)),
        (gated, kernels.norm_linear_silu(gated.x, gated.norm, EPS, gated.weight, gated.bias)),
        (alone, kernels.norm_linear_silu(alone.x, None, EPS, alone.weight, alone.bias)),
    )
    for case, out in results:
        assert out.dtype == torch.bfloat16
        assert_right(out, case.exact(), limit_of(torch.bfloat16))
    wide = kernels.skinny_linear(linear.x, linear.weight, linear.bias, torch.float32)
    assert_right(wide, linear.exact(), 1e-5)


@pytest.mark.interpreted
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("tokens", [33, 64, 100, 128])
def test_gated_products_of_many_tokens_equal_float64(tokens: int, dtype: torch.dtype) -> None:
    from stoop.ops.kernels.gated import launch_gated
    from stoop.ops.kernels.linear_choice import GemmTiling

    torch.manual_seed(tokens)
    for size in SIZES:
        case = make_case("gated alone", tokens, size, dtype, bias=size == SIZES[0])
        for tiling in (GemmTiling(32, 1, 32, 4, 2), GemmTiling(64, 1, 256, 4, 2)):
            out = torch.full_like(case.residual, torch.nan)
            launch_gated(case.x, case.weight, case.bias, out, tiling)
            assert_right(out, case.exact(), limit_of(dtype))


@pytest.mark.interpreted
@pytest.mark.parametrize("tokens", [32, 33, 128])
def test_the_norm_of_gated_products(tokens: int) -> None:
    """Inside the kernel for few tokens, before it for many, unless they are cut into parts."""
    from stoop.ops.kernels import linear as kernels

    torch.manual_seed(0)
    for size in ((44, 200), (44, 1040)):
        case = make_case("gated", tokens, size, torch.bfloat16, bias=True)
        out = kernels.norm_linear_silu(case.x, case.norm, EPS, case.weight, case.bias)
        assert_right(out, case.exact(), limit_of(torch.bfloat16))


@pytest.mark.interpreted
def test_a_residual_is_added_before_rounding() -> None:
    """Else a small branch would be rounded twice."""
    torch.manual_seed(0)
    case = make_case("add", 5, (64, 64), torch.float16)
    for tiling in tilings(5):
        nearest = case.exact().half()
        assert (case.run(tiling) != nearest).float().mean() < 0.02  # ties of float32 sums


def test_decisions_hold() -> None:
    from stoop.ops.kernels import linear_choice as choice

    shape = choice.LinearShape("add", 12345, 77, torch.float16)
    first = choice.decide(shape, 5)
    other = choice.GemmTiling(64, 1, 64, 1, 3)
    choice.install({(shape, 8): other, (shape, 32): None})
    assert choice.decide(shape, 8) == first != other
    assert choice.decide(shape, 30) is None and choice.tiling_for(shape, 30) is not None
    x = torch.zeros(5, 77)
    assert not choice.uses_skinny("add", x, x)  # neither the device nor the precision


CANDIDATES = [
    (inputs, kind, bucket)
    for k, (inputs, kind) in enumerate(((576, "gated"), (1536, "add"), (4096, "norm")))
    for b, bucket in enumerate((1, 4, 8, 32))
    if EVERY or (k + b) % 2 == 0
]


@pytest.mark.parametrize(("inputs", "kind", "bucket"), CANDIDATES)
def test_candidates_compile_for_an_h200(inputs: int, kind: Any, bucket: int) -> None:
    from stoop.ops.kernels.linear_choice import LinearShape
    from stoop.ops.kernels.linear_tuning import candidates

    case = make_case(kind, bucket, (128, inputs), torch.bfloat16)
    with compile_launches() as found:
        for tiling in candidates(LinearShape(kind, 128, inputs, torch.bfloat16), bucket):
            case.run(tiling)
    for compiled in found:
        print(compiled)
    fitting = [c for c in found if c.shared <= MAX_SHARED and c.spilled <= STACK]
    # What does not fit is left out when it is tried.
    assert len(fitting) >= min(3, len(found))


@pytest.mark.parametrize("bucket", [64, 128])
def test_gated_candidates_fit_an_h200(bucket: int) -> None:
    from stoop.ops.kernels.gated import launch_gated
    from stoop.ops.kernels.linear_choice import LinearShape, default
    from stoop.ops.kernels.linear_tuning import candidates

    shape = LinearShape("gated", 28672, 4096, torch.bfloat16)
    case = make_case("gated alone", bucket, (512, 4096), torch.bfloat16)
    tilings = candidates(shape, bucket)
    assert default(shape, bucket) in tilings
    with compile_launches() as found:
        for tiling in tilings:
            launch_gated(case.x, case.weight, None, case.residual, tiling)
    for compiled in found:
        print(compiled)
        assert compiled.shared <= MAX_SHARED and compiled.spilled == 0, compiled


def test_gated_products_leave_few_sms_idle() -> None:
    """Of Llama-8B's gates and ups; not of Qwen3-14B's, 1B's, nor 0.6B's; SmolLM2's go in parts."""
    from stoop.ops.kernels.linear_choice import GemmTiling, LinearShape, default

    def chosen(rows: int, inputs: int, bucket: int) -> Any:
        return default(LinearShape("gated", rows, inputs, torch.bfloat16), bucket)

    assert chosen(28672, 4096, 128) == GemmTiling(256, 1, 64, 8, 4)
    assert chosen(28672, 4096, 64) == GemmTiling(128, 1, 64, 8, 4)
    for rows, inputs in ((34816, 5120), (16384, 2048), (6144, 1024)):
        assert chosen(rows, inputs, 128) is None and chosen(rows, inputs, 64) is None
    assert chosen(3072, 576, 128) is None and chosen(3072, 576, 64).tokens == 16
    assert chosen(28672, 4096, 16) is None


def test_small_gpus_follow_measurements_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """The rules may ask for more shared memory than they have."""
    from stoop.ops.kernels import linear_choice as choice

    x, weight = torch.zeros(2, 64, dtype=torch.bfloat16), torch.zeros(32, 64, dtype=torch.bfloat16)
    monkeypatch.setattr(choice, "uses_kernels", lambda tensor: True)
    monkeypatch.setattr(choice, "_decisions", {})
    assert choice.uses_skinny("add", x, weight)
    monkeypatch.setattr(choice, "has_large_tiles", lambda device: False)
    monkeypatch.setattr(choice, "_decisions", {})
    assert not choice.uses_skinny("add", x, weight)
    shape = choice.LinearShape("add", 32, 64, torch.bfloat16)
    choice.install({(shape, 4): choice.FALLBACK_TILING})
    assert choice.uses_skinny("add", x, weight)


SHAPES_OF_MODELS = ((576, 576), (576, 1536), (960, 576), (49152, 576), (2048, 8192), (6144, 4096))


@pytest.mark.parametrize("bucket", [1, 4, 8, 16, 32, 64, 128])
def test_defaults_fit_an_h200(bucket: int) -> None:
    """Whatever the rules say unmeasured must run, for every kind and for large and small models."""
    from stoop.ops.kernels import linear_choice as choice

    for kind in ("linear", "logits", "add", "norm", "gated"):
        for outputs, inputs in SHAPES_OF_MODELS:
            shape = choice.LinearShape(kind, outputs, inputs, torch.bfloat16)
            tiling = choice.default(shape, bucket) or choice.FALLBACK_TILING
            most = 64 if kind in ("linear", "logits") else choice.MAX_NORMED
            if tiling.block_t(bucket) > most:
                continue  # left to cuBLAS, or to another kernel
            case = make_case(kind, bucket, (128, inputs), torch.bfloat16)
            dtype = torch.float32 if kind == "logits" else None
            with compile_launches() as found:
                case.run(tiling, dtype)
            (compiled,) = found
            stack = STACK if bucket < 64 else 64  # a warp's 64 x 64 sums fill its registers
            assert compiled.shared <= MAX_SHARED and compiled.spilled <= stack, compiled


def test_measurements_are_kept(tmp_path: Path) -> None:
    from stoop.ops.kernels import linear_tuning as tuning
    from stoop.ops.kernels.linear_choice import GemmTiling, LinearShape

    shape = LinearShape("gated", 3072, 576, torch.bfloat16)
    decisions = {
        (shape, 1): GemmTiling(4, 1, 1024, 4, dot=False),
        (shape, 16): GemmTiling(32, 1, 64, 1, 5, tokens=8),
        (shape, 64): None,
    }
    tuning.save(tmp_path / "new" / "some.json", decisions)
    assert tuning.load(tmp_path / "new" / "some.json") == decisions
    assert tuning.load(tmp_path / "none.json") == {}


def test_recording_decides_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    from stoop.ops.kernels import linear_choice

    decisions: dict[Any, Any] = {}
    monkeypatch.setattr(linear_choice, "_decisions", decisions)
    monkeypatch.setattr(linear_choice, "uses_kernels", lambda tensor: True)
    x, weight = torch.zeros(2, 64, dtype=torch.bfloat16), torch.zeros(32, 64, dtype=torch.bfloat16)
    with linear_choice.recording() as found:
        assert not linear_choice.uses_skinny("add", x, weight)
        assert not linear_choice.uses_skinny("add", x.float(), weight.float())
    shape = linear_choice.LinearShape("add", 32, 64, torch.bfloat16)
    assert list(found) == [shape] and not decisions
    assert linear_choice.uses_skinny("add", x, weight) and list(decisions) == [(shape, 4)]


def test_float16_states_are_scaled_before_they_are_multiplied(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The kernel scales the product instead, and 40,000 times a norm's weight of 2 overflows."""
    from stoop.ops.kernels import linear_choice

    monkeypatch.setattr(linear_choice, "_decisions", {})
    monkeypatch.setattr(linear_choice, "uses_kernels", lambda tensor: True)
    for dtype in (torch.float16, torch.bfloat16):
        x, weight = torch.zeros(4, 576, dtype=dtype), torch.zeros(960, 576, dtype=dtype)
        for kind in ("norm", "gated"):
            assert linear_choice.uses_skinny(kind, x, weight) == (dtype == torch.bfloat16)
        assert linear_choice.uses_skinny("linear", x, weight)
