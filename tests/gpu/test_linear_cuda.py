"""Products of few tokens on a CUDA device: right, the same in every replay, and in a chain."""

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from support.linear_cases import EPS, KINDS, assert_right, limit_of, make_case

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
pytest.importorskip("triton")

# Rows and inputs: SmolLM2, Llama-8B, and sizes that fit no block.
SIZES = ((960, 576), (576, 1536), (6144, 4096), (202, 1000), (50, 36))


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


@pytest.mark.parametrize("kind", KINDS)
def test_products_equal_float64(kind: Any) -> None:
    """By our rules, and by some of the candidates: all would take minutes to compile."""
    from stoop.ops.kernels import linear_choice as choice
    from stoop.ops.kernels.linear_tuning import candidates

    for tokens, size in itertools.product((1, 3, 17, 32, 100), SIZES):
        case = make_case(kind, tokens, size, torch.bfloat16, bias=size[0] == 202, device="cuda")
        exact = case.exact()
        shape = choice.LinearShape(kind.split()[0], *size, torch.bfloat16)
        bucket = choice.bucket_of(tokens)
        chosen = choice.default(shape, bucket) or choice.FALLBACK_TILING
        others = candidates(shape, bucket)
        for tiling in (chosen, *others[:1], *others[-2:-1]):
            if not tiling.norms(tokens):
                continue
            out = case.run(tiling)
            assert_right(out, exact, limit_of(torch.bfloat16))
            assert torch.equal(out, case.run(tiling))


def test_gated_products_of_many_tokens() -> None:
    from stoop.ops.kernels.gated import launch_gated
    from stoop.ops.kernels.linear_choice import LinearShape
    from stoop.ops.kernels.linear_tuning import candidates

    for tokens, size in itertools.product((33, 64, 100, 128), ((28672, 4096), *SIZES)):
        bias = size[0] == 202
        case = make_case("gated alone", tokens, size, torch.bfloat16, bias=bias, device="cuda")
        exact = case.exact()
        found = candidates(LinearShape("gated", *size, torch.bfloat16), 128)
        for tiling in [tiling for tiling in found if not tiling.tokens][:2]:
            out, again = torch.full_like(case.residual, torch.nan), torch.empty_like(case.residual)
            launch_gated(case.x, case.weight, case.bias, out, tiling)
            launch_gated(case.x, case.weight, case.bias, again, tiling)
            assert_right(out, exact, limit_of(torch.bfloat16))
            assert torch.equal(out, again)


def test_how_memory_is_divided() -> None:
    """As a launch asked, and then no more: other launches of the same kernel ask the same."""
    import ctypes

    from stoop.ops.kernels import launch
    from stoop.ops.kernels.norm import _rms_norm_kernel

    x = torch.zeros(1, 48, device="cuda")
    arguments = (x, x[0], torch.empty_like(x), 48, 48, 48, 1e-5)
    kernel = _rms_norm_kernel[(1,)](*arguments, BLOCK=64, PDL=False, num_warps=2)
    found = ctypes.c_int(-2)
    for percent in (launch.BALANCED, launch.CACHE_FIRST):
        launch.divide_memory(kernel, percent)
        attribute = launch._CARVEOUT_ATTRIBUTE
        driver, function = launch._driver(), ctypes.c_void_p(kernel.function)
        assert driver.cuFuncGetAttribute(ctypes.byref(found), attribute, function) == 0
        assert found.value == launch.BALANCED


def test_float16_and_wide_logits() -> None:
    from stoop.ops.kernels import linear as kernels

    for tokens in (1, 4, 32):
        case = make_case("linear", tokens, (49152, 576), torch.float16, device="cuda")
        logits = kernels.skinny_linear(case.x, case.weight, None, torch.float32)
        assert_right(logits, case.exact(), 1e-5)


def test_a_weight_of_more_than_two_to_the_31_elements() -> None:
    from stoop.ops.kernels import linear as kernels

    weight = torch.zeros(2**31 // 4096 + 64, 4096, dtype=torch.bfloat16, device="cuda")
    weight[-64:].normal_()
    for tokens in (1, 4):
        x = torch.randn(tokens, 4096, device="cuda").bfloat16()
        out = kernels.skinny_linear(x, weight)[:, -64:]
        assert_right(out, x.double() @ weight[-64:].double().t(), limit_of(torch.bfloat16))


@dataclass(frozen=True)
class Chain:
    """Layers whose every product needs the one before: what starts too early reads old values."""

    norms: Tensor  # [layers, 2, hidden]
    first: Tensor  # [layers, hidden, hidden]
    second: Tensor  # [layers, hidden, hidden]
    gate_up: Tensor  # [layers, 2 * inner, hidden]
    down: Tensor  # [layers, hidden, inner]

    def run(self, stream: Tensor, between: Callable[[], None] = lambda: None) -> list[Tensor]:
        from stoop.ops.kernels import linear as kernels

        seen = []
        for norms, first, second, gate_up, down in zip(
            self.norms, self.first, self.second, self.gate_up, self.down, strict=True
        ):
            attended = kernels.norm_linear(stream, norms[0], EPS, first)
            between()
            stream = kernels.linear_add(attended, second, None, stream)
            between()
            inner = kernels.norm_linear_silu(stream, norms[1], EPS, gate_up)  # many: two kernels
            between()
            stream = kernels.linear_add(inner, down, None, stream)
            between()
            seen.append(stream)
        return seen


def make_chain(hidden: int, inner: int, layers: int) -> Chain:
    def draw(*shape: int) -> Tensor:
        return (torch.randn(layers, *shape, device="cuda") * shape[-1] ** -0.5).bfloat16()

    norms = torch.rand(layers, 2, hidden, device="cuda").bfloat16() + 0.5
    parts = draw(hidden, hidden), draw(hidden, hidden), draw(2 * inner, hidden), draw(hidden, inner)
    return Chain(norms, *parts)


@pytest.mark.parametrize("tokens", [1, 4, 8, 32, 48])
@pytest.mark.parametrize(("hidden", "inner"), [(576, 1536), (2048, 8192)])
def test_a_chain_in_a_graph_equals_one_that_waits(hidden: int, inner: int, tokens: int) -> None:
    """200 replays of fresh inputs: a kernel that did not wait would show in some."""
    chain = make_chain(hidden, inner, layers=6)
    x = torch.randn(tokens, hidden, device="cuda").bfloat16()
    chain.run(x)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        replayed = chain.run(x)
    for index in range(200):
        x.copy_(torch.randn_like(x))
        graph.replay()
        if index % 10 == 0:
            waiting = chain.run(x, torch.cuda.synchronize)
        else:
            waiting = chain.run(x)
        for ours, theirs in zip(replayed, waiting, strict=True):
            assert torch.equal(ours, theirs), index
        assert replayed[-1].isfinite().all()


def test_every_replay_gives_the_same_bits() -> None:
    chain = make_chain(576, 1536, layers=30)
    x = torch.randn(4, 576, device="cuda").bfloat16()
    expected = chain.run(x, torch.cuda.synchronize)[-1]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        (*_, out) = chain.run(x)
    for _ in range(200):
        out.fill_(torch.nan)
        graph.replay()
        graph.replay()  # behind itself, too
        assert torch.equal(out, expected)
