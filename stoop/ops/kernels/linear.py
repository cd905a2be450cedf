"""GEMMs over few tokens, fused with what precedes and follows them in a decoder layer.

They are bound by reading the weights once. So one program computes a band of outputs, for all
tokens or, where weights are small, for some of them, and loops over all inputs. The norm before the
GEMM needs no pass of its own, because a token's scale is a factor of its whole row: squares are
summed during the GEMM, and the scale multiplies the result. No program needs another's sum, and the
same inputs give the same bits.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from stoop.ops.kernels import linear_choice
from stoop.ops.kernels.gated import launch_gated
from stoop.ops.kernels.launch import (
    BALANCED,
    CACHE_FIRST,
    SHARED_FIRST,
    divide_memory,
    let_next_start,
    let_next_start_if,
    overlapping,
    prefetch,
    wait_for_inputs,
)
from stoop.ops.kernels.linear_choice import GemmTiling, Kind, LinearShape, tiling_for
from stoop.ops.kernels.norm import rms_norm
from stoop.ops.library import register

INTERPRETED = triton.knobs.runtime.interpret
AHEAD_BYTES = 32 * 1024  # of weights that a program prefetches before its inputs are ready
MAX_WAITING = 1024  # roughly the number of programs that are resident on a GPU
# With `prefetch_weight`, as much of the weight as the L2 cache holds is loaded before the inputs
# are ready, by up to MAX_SHARES programs, which start early.
WHOLE_BYTES = 16 * 2**20
MAX_SHARES = 256
AT_START = tl.constexpr(linear_choice.AT_START)
AFTER_LOOP = tl.constexpr(linear_choice.AFTER_LOOP)


@triton.jit
def _row(index, first, num_outputs, OUTPUTS: tl.constexpr):
    """The row of the weight for a program's row: its outputs, or first its gates and then its ups.

    Past the end, reading the last row again is cheaper than a mask.
    """
    return tl.minimum(first + index % OUTPUTS, num_outputs - 1) + index // OUTPUTS * num_outputs


@triton.jit
def _prefetch_rows(
    weight_ptr, first, num_outputs, num_inputs,
    OUTPUTS: tl.constexpr, ROWS: tl.constexpr, AHEAD: tl.constexpr, THREADS: tl.constexpr,
):  # fmt: skip
    """Prefetch the first AHEAD bytes of each of a program's rows."""
    thread = tl.arange(0, THREADS)
    row = _row(thread, first, num_outputs, OUTPUTS).to(tl.int64)
    prefetch(weight_ptr + row * num_inputs, tl.where(thread < ROWS, AHEAD, 0))


@triton.jit
def _prefetch_share(weight_ptr, SHARES: tl.constexpr, AHEAD: tl.constexpr, THREADS: tl.constexpr):
    """Prefetch one of SHARES parts of AHEAD bytes, one chunk per thread, for any program."""
    CHUNK: tl.constexpr = (AHEAD // (SHARES * THREADS) + 15) // 16 * 16
    part = tl.program_id(0) * THREADS + tl.arange(0, THREADS)
    size = tl.minimum(AHEAD - part * CHUNK, CHUNK)
    prefetch(weight_ptr.to(tl.int64) + part * CHUNK, tl.where(part < SHARES * THREADS, size, 0))


@triton.jit
def _prefetch(
    weight_ptr, first, num_outputs, num_inputs,
    OUTPUTS: tl.constexpr, ROWS: tl.constexpr, SHARES: tl.constexpr, AHEAD: tl.constexpr,
    THREADS: tl.constexpr,
):  # fmt: skip
    if SHARES > 0:
        _prefetch_share(weight_ptr, SHARES, AHEAD, THREADS)
    elif AHEAD > 0:
        _prefetch_rows(weight_ptr, first, num_outputs, num_inputs, OUTPUTS, ROWS, AHEAD, THREADS)


@triton.jit
def _load(ptr, offset, live, EVEN: tl.constexpr):
    if EVEN:
        return tl.load(ptr + offset)
    return tl.load(ptr + offset, mask=live, other=0.0)


@triton.jit
def _dot(a, b, acc, WIDE: tl.constexpr):
    if WIDE:
        a, b = a.to(tl.float32), b.to(tl.float32)
    return tl.dot(a, b, acc, input_precision="ieee")


@triton.jit
def _fold(x):
    """[a, b, n] to [a, b, n / 8]: sums of neighbours that one thread has loaded together."""
    return tl.sum(tl.reshape(x, (x.shape[0], x.shape[1], x.shape[2] // 8, 8)), 3)


@triton.jit
def _add_product(
    acc, squares, weight, norm, x_ptr, k, live, token_mask,
    NORM: tl.constexpr, DOT: tl.constexpr, SQUARE: tl.constexpr, EVEN: tl.constexpr,
    WIDE: tl.constexpr,
):  # fmt: skip
    """Add one block of inputs to the accumulators.

    DOT: x [ways, tokens, inputs], weight [ways, rows, inputs], acc [ways, rows, tokens]
    else x [1, tokens, inputs], weight [rows, 1, inputs], acc [rows, tokens, inputs / 8]
    SQUARE: squares [ways, tokens, tokens], else [ways or 1, tokens, inputs / 8]
    """
    x = tl.load(x_ptr + k, mask=token_mask if EVEN else token_mask & live, other=0.0)
    if NORM:
        if SQUARE:
            # As x @ x.T, of which only the diagonal is used: in a pipelined loop x stays in the
            # layout of a dot operand, and sums in any other layout cause bank conflicts.
            squares = _dot(x, tl.permute(x, (0, 2, 1)), squares, WIDE)
        else:
            squares += _fold(x.to(tl.float32) * x.to(tl.float32))
    if DOT:
        turned = tl.permute(x, (0, 2, 1))
        if NORM:
            # Rounded, because it is a dot operand; the token's scale is applied at the end.
            turned = turned.to(tl.float32) * tl.permute(norm, (0, 2, 1)).to(tl.float32)
        acc = _dot(weight, turned.to(x.dtype), acc, WIDE)
    else:
        wide = x.to(tl.float32)
        if NORM:
            wide = (wide * norm.to(tl.float32)).to(x.dtype).to(tl.float32)
        acc += _fold(weight.to(tl.float32) * wide)
    return acc, squares


@triton.jit
def _add_products(
    acc, squares, rows_ptr, norm_ptr, x_ptr, k, token_mask, num_inputs,
    NORM: tl.constexpr, DOT: tl.constexpr, EVEN: tl.constexpr, WIDE: tl.constexpr,
    STEP: tl.constexpr, LAST: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Add all blocks of inputs. If LAST > 0, the next kernel may start when LAST inputs remain."""
    for start in range(0, num_inputs, STEP):
        if LAST > 0:
            let_next_start_if(start + LAST >= num_inputs, PDL)
        live = start + k < num_inputs
        weight = _load(rows_ptr, start + k, live, EVEN)
        norm = _load(norm_ptr, start + k, live, EVEN)
        acc, squares = _add_product(
            acc, squares, weight, norm, x_ptr, start + k, live, token_mask,
            NORM, DOT, DOT, EVEN, WIDE,
        )  # fmt: skip
    return acc, squares


@triton.jit
def _sum_squares(squares, SQUARE: tl.constexpr):
    """The sum of squares of each token; `squares` has the shape that `_add_product` describes."""
    if SQUARE:
        token = tl.arange(0, squares.shape[1])
        squares = tl.where(token[:, None] == token[None, :], tl.sum(squares, 0), 0.0)[None]
    return tl.sum(tl.sum(squares, 2), 0)


@triton.jit
def _silu_and_mul(gate_up):
    """[2n, tokens] to [n, tokens]"""
    halves = tl.reshape(gate_up, (2, gate_up.shape[0] // 2, gate_up.shape[1]))
    gate, up = tl.split(tl.permute(halves, (1, 2, 0)))
    return gate / (1.0 + tl.exp(-gate)) * up


@triton.jit(do_not_specialize=["num_tokens"])
def _linear_kernel(
    x_ptr, weight_ptr, bias_ptr, norm_ptr, residual_ptr, out_ptr,
    num_tokens, num_outputs, num_inputs, eps,
    NORM: tl.constexpr, GATED: tl.constexpr, DOT: tl.constexpr, EVEN: tl.constexpr,
    ONCE: tl.constexpr, BLOCK_T: tl.constexpr, ROWS: tl.constexpr, WAYS: tl.constexpr,
    BLOCK_K: tl.constexpr, AHEAD: tl.constexpr, SHARES: tl.constexpr, THREADS: tl.constexpr,
    WIDE: tl.constexpr, SIGNAL: tl.constexpr, LAST: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Multiply ROWS of the weight by BLOCK_T tokens. Each way of a block of WAYS * BLOCK_K inputs
    is one warp's: no two warps read the same weights, and their sums are added at the end."""
    if SIGNAL == AT_START:
        let_next_start(PDL)
    OUTPUTS: tl.constexpr = ROWS // 2 if GATED else ROWS
    first = tl.program_id(0) * OUTPUTS
    row = _row(tl.arange(0, ROWS), first, num_outputs, OUTPUTS)
    far = row.to(tl.int64) * num_inputs
    rows_ptr = weight_ptr + (far[None, :, None] if DOT else far[:, None, None])
    k = tl.arange(0, WAYS)[:, None, None] * BLOCK_K + tl.arange(0, BLOCK_K)[None, None, :]
    if ONCE:
        weight = _load(rows_ptr, k, k < num_inputs, EVEN)
        norm = _load(norm_ptr, k, k < num_inputs, EVEN)
    else:
        _prefetch(weight_ptr, first, num_outputs, num_inputs, OUTPUTS, ROWS, SHARES, AHEAD, THREADS)
    if bias_ptr is not None:
        bias = tl.load(bias_ptr + row)
    wait_for_inputs(PDL)

    token = tl.program_id(1) * BLOCK_T + tl.arange(0, BLOCK_T)
    output = (first + tl.arange(0, OUTPUTS))[:, None]
    place = token[None, :].to(tl.int64) * num_outputs + output
    stored = (output < num_outputs) & (token < num_tokens)[None, :]
    if residual_ptr is not None:  # loaded along with the inputs, not after the loop
        residual = tl.load(residual_ptr + place, mask=stored, other=0.0)
    token_mask = (token < num_tokens)[None, :, None]
    x_ptr += token[None, :, None] * num_inputs
    acc = tl.zeros((WAYS, ROWS, BLOCK_T) if DOT else (ROWS, BLOCK_T, BLOCK_K // 8), tl.float32)
    SQUARE: tl.constexpr = DOT and not ONCE
    squares = tl.zeros((WAYS, BLOCK_T, BLOCK_T if SQUARE else BLOCK_K // 8), tl.float32)
    if ONCE:
        acc, squares = _add_product(
            acc, squares, weight, norm, x_ptr, k, k < num_inputs, token_mask,
            NORM, DOT, False, EVEN, WIDE,
        )  # fmt: skip
    else:
        acc, squares = _add_products(
            acc, squares, rows_ptr, norm_ptr, x_ptr, k, token_mask, num_inputs,
            NORM, DOT, EVEN, WIDE, WAYS * BLOCK_K, LAST, PDL,
        )  # fmt: skip
    if SIGNAL == AFTER_LOOP:
        let_next_start(PDL)
    acc = tl.sum(acc, 0 if DOT else 2)
    if NORM:
        acc *= tl.rsqrt(_sum_squares(squares, SQUARE) / num_inputs + eps)[None, :]
    if bias_ptr is not None:
        acc += bias.to(tl.float32)[:, None]
    if GATED:
        acc = _silu_and_mul(acc)
    if residual_ptr is not None:
        acc += residual.to(tl.float32)
    tl.store(out_ptr + place, acc.to(out_ptr.dtype.element_ty), mask=stored)


def launch(
    x: Tensor,
    weight: Tensor,
    out: Tensor,
    tiling: GemmTiling,
    *,
    bias: Tensor | None = None,
    norm: tuple[Tensor | None, float] = (None, 0.0),
    residual: Tensor | None = None,
    gated: bool = False,
    prefetch_weight: bool = False,
) -> None:
    """Launch the kernel. All tensors must be contiguous.

    norm: its weight and epsilon; the weight is None if there is no norm
    prefetch_weight: load the whole weight before x is ready
    """
    num_tokens, num_inputs = x.shape
    num_outputs = weight.shape[0] // 2 if gated else weight.shape[0]
    assert x.is_contiguous() and weight.is_contiguous() and weight.shape[1] == num_inputs
    assert out.is_contiguous() and out.shape == (num_tokens, num_outputs)
    assert tiling.dot or num_tokens <= linear_choice.MAX_TOKENS_WITHOUT_DOT, (tiling, num_tokens)
    outputs = tiling.rows // 2 if gated else tiling.rows
    block_t = tiling.block_t(num_tokens)
    grid = triton.cdiv(num_outputs, outputs), triton.cdiv(num_tokens, block_t)
    step, options = tiling.ways * tiling.block_k, overlapping(x)
    ahead, shares = _ahead(weight, tiling.rows, grid, prefetch_weight) if options["PDL"] else (0, 0)
    kernel = _linear_kernel[grid](
        x, weight, bias, x if norm[0] is None else norm[0], residual, out,
        num_tokens, num_outputs, num_inputs, norm[1], NORM=norm[0] is not None,
        GATED=gated, DOT=tiling.dot, EVEN=num_inputs % step == 0, ONCE=num_inputs <= step,
        BLOCK_T=block_t, ROWS=tiling.rows, WAYS=tiling.ways,
        BLOCK_K=tiling.block_k, AHEAD=ahead, SHARES=shares, SIGNAL=tiling.signal,
        LAST=tiling.num_stages * step if tiling.signal == linear_choice.WITH_LAST_LOADS else 0,
        THREADS=32 * tiling.num_warps,
        # Triton's interpreter cannot multiply in bfloat16.
        WIDE=INTERPRETED and x.dtype == torch.bfloat16,
        num_warps=tiling.num_warps, num_stages=tiling.num_stages, **options,
    )  # fmt: skip
    divide_memory(kernel, _division(tiling.dot, block_t))


def _division(dot: bool, block_t: int) -> int:
    if not dot:
        return CACHE_FIRST
    return BALANCED if block_t == 8 else SHARED_FIRST


def _ahead(weight: Tensor, rows: int, grid: tuple[int, int], whole: bool) -> tuple[int, int]:
    """What to prefetch while waiting for the inputs: (bytes of each of a program's rows, 0), or
    (bytes of the whole weight, number of programs that share it)."""
    row_bytes = weight.shape[1] * weight.dtype.itemsize
    if row_bytes % 16 != 0 or weight.data_ptr() % 16 != 0:
        return 0, 0
    if whole:
        return min(weight.nbytes, WHOLE_BYTES), min(grid[0], MAX_SHARES)
    if grid[0] * grid[1] > MAX_WAITING:  # not all programs start early
        return 0, 0
    return min(row_bytes, AHEAD_BYTES // rows), 0


def _tiling(kind: Kind, x: Tensor, weight: Tensor) -> GemmTiling:
    return tiling_for(LinearShape(kind, weight.shape[0], weight.shape[1], x.dtype), x.shape[0])


@register("skinny_linear_(Tensor x, Tensor weight, Tensor? bias, Tensor(a!) out) -> ()")
def skinny_linear_(x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor) -> None:
    """out = x @ weight.T + bias, in the dtype of out, which may be float32

    x: [tokens, inputs], weight: [outputs, inputs], bias: [outputs], out: [tokens, outputs]
    """
    kind: Kind = "logits" if out.dtype == torch.float32 else "linear"
    launch(x, weight, out, _tiling(kind, x, weight), bias=bias)


@register(
    "linear_add_(Tensor x, Tensor weight, Tensor? bias, Tensor residual, "
    "bool prefetch_weight, Tensor(a!) out) -> ()"
)
def linear_add_(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    residual: Tensor,
    prefetch_weight: bool,
    out: Tensor,
) -> None:
    """out = residual + x @ weight.T + bias, rounded once. out must not be the residual."""
    assert residual.is_contiguous() and residual.shape == out.shape
    tiling = _tiling("add", x, weight)
    launch(
        x, weight, out, tiling, bias=bias, residual=residual, prefetch_weight=prefetch_weight
    )  # fmt: skip


@register(
    "norm_linear_(Tensor x, Tensor norm_weight, float eps, Tensor weight, Tensor? bias, "
    "Tensor(a!) out) -> ()"
)
def norm_linear_(
    x: Tensor, norm_weight: Tensor, eps: float, weight: Tensor, bias: Tensor | None, out: Tensor
) -> None:
    """out = rms_norm(x, norm_weight, eps) @ weight.T + bias"""
    launch(x, weight, out, _tiling("norm", x, weight), bias=bias, norm=(norm_weight, eps))


@register(
    "norm_linear_silu_(Tensor x, Tensor? norm_weight, float eps, Tensor weight, Tensor? bias, "
    "Tensor(a!) out) -> ()"
)
def norm_linear_silu_(
    x: Tensor,
    norm_weight: Tensor | None,
    eps: float,
    weight: Tensor,
    bias: Tensor | None,
    out: Tensor,
) -> None:
    """out = silu(gate) * up of rms_norm(x, norm_weight, eps) @ weight.T + bias

    norm_weight: [inputs], or None for no norm; weight: [2n, inputs], gates first; out: [tokens, n]
    """
    tiling = _tiling("gated", x, weight)
    if tiling.norms(x.shape[0]):
        launch(x, weight, out, tiling, bias=bias, norm=(norm_weight, eps), gated=True)
        return
    normed = x if norm_weight is None else rms_norm(x, norm_weight, eps)
    launch_gated(normed, weight, bias, out, tiling)


def skinny_linear(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, dtype: torch.dtype | None = None
) -> Tensor:
    out = torch.empty(x.shape[0], weight.shape[0], dtype=dtype or x.dtype, device=x.device)
    skinny_linear_(x, weight, bias, out)
    return out


def linear_add(
    x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor, prefetch_weight: bool = False
) -> Tensor:
    out = torch.empty_like(residual)
    linear_add_(x, weight, bias, residual, prefetch_weight, out)
    return out


def norm_linear(
    x: Tensor, norm_weight: Tensor, eps: float, weight: Tensor, bias: Tensor | None = None
) -> Tensor:
    out = x.new_empty(x.shape[0], weight.shape[0])
    norm_linear_(x, norm_weight, eps, weight, bias, out)
    return out


def norm_linear_silu(
    x: Tensor, norm_weight: Tensor | None, eps: float, weight: Tensor, bias: Tensor | None = None
) -> Tensor:
    out = x.new_empty(x.shape[0], weight.shape[0] // 2)
    norm_linear_silu_(x, norm_weight, eps, weight, bias, out)
    return out
