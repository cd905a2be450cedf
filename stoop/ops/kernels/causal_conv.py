"""Depthwise causal convolution. A program has a tile of one row's tokens and some channels.

The program of a row's first tile owns the row's window and log in these channels: it alone reads
and writes them. Later tiles of a chunk read inputs only.
"""

import triton
import triton.language as tl
from torch import Tensor

from stoop.ops.causal_conv import ConvState
from stoop.ops.kernels.choice import CONV_WIDTHS
from stoop.ops.kernels.launch import (
    let_next_start,
    load_early,
    overlapping,
    wait_for_inputs,
)
from stoop.ops.kernels.recurrent import count_tiles, read_tile, zero_rest
from stoop.ops.library import register
from stoop.ops.recurrent import RecurrentRows

MAX_CHANNELS = 256  # per program
# Warps of a program: few where there are programs enough to fill a GPU, and tokens few enough for
# their registers
WARPS, FEW_WARPS = 4, 1
MANY_PROGRAMS, FEW_BYTES = 512, 8  # the latter of a channel in a tile
MAX_ELEMENTS = 2048  # tokens times channels
CHUNK_TOKENS = 16  # of a tile, if some row may be a chunk


@triton.jit
def _kept_input(
    place, column, needed, window_ptr, log_ptr, pending, channels, WIDTH: tl.constexpr
):  # fmt: skip
    """Inputs before the row's first: `place` is negative. Zeros where not needed."""
    seen = place + pending + (WIDTH - 1)  # in the window, then the log
    in_log = seen >= WIDTH - 1
    old = load_early(
        window_ptr + seen * channels + column, mask=needed & (place < 0) & ~in_log, other=0.0
    )
    logged = load_early(
        log_ptr + (seen - (WIDTH - 1)) * channels + column,
        mask=needed & (place < 0) & in_log,
        other=0.0,
    )
    return tl.where(in_log, logged, old)


@triton.jit
def _nothing():
    return ()


@triton.jit
def _kept_inputs(
    place, column, needed, window_ptr, log_ptr, pending, channels, WIDTH: tl.constexpr
):  # fmt: skip
    """At the WIDTH - 1 places before `place`; those from the row's first token on are zeros."""
    found = _nothing()
    for tap in tl.static_range(WIDTH - 1):
        found += (_kept_input(
            place + (tap - (WIDTH - 1)), column, needed, window_ptr, log_ptr, pending, channels,
            WIDTH,
        ),)  # fmt: skip
    return found


@triton.jit
def _new_input(x_ptr, token, column, needed, x_stride, channels, GATED: tl.constexpr):
    """Inputs of this step; GATED: the products B * x, rounded as they are kept."""
    source = x_ptr + token.to(tl.int64) * x_stride + column
    x = tl.load(source, mask=needed, other=0.0)
    if GATED:
        right = tl.load(source + 2 * channels, mask=needed, other=0.0)
        x = (x.to(tl.float32) * right.to(tl.float32)).to(x.dtype)
    return x


@triton.jit
def _convolve(
    old, x_ptr, weight_ptr, bias_ptr, offset, column, inside, live, x_stride, channels,
    WIDTH: tl.constexpr, GATED: tl.constexpr, TILE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The sum over taps in float32, and the tokens' own inputs. x_ptr: at the row's first token"""
    total = tl.zeros([TILE, BLOCK], tl.float32)
    for tap in tl.static_range(WIDTH - 1):
        place = offset + (tap - (WIDTH - 1))
        x = _new_input(x_ptr, place, column, live & (place >= 0), x_stride, channels, GATED)
        x = tl.where(place < 0, old[tap], x)
        weight = tl.load(weight_ptr + tap, mask=inside, other=0.0)
        total = tl.fma(x.to(tl.float32), weight.to(tl.float32), total)
    x = _new_input(x_ptr, offset, column, live, x_stride, channels, GATED)
    weight = tl.load(weight_ptr + (WIDTH - 1), mask=inside, other=0.0)
    total = tl.fma(x.to(tl.float32), weight.to(tl.float32), total)
    if bias_ptr is not None:
        total += tl.load(bias_ptr + column, mask=inside, other=0.0).to(tl.float32)
    return total, x


@triton.jit(do_not_specialize=["num_tokens", "num_reqs", "log_len"])
def _conv_kernel(
    x_ptr, weight_ptr, bias_ptr, starts_ptr, contexts_ptr, seq_lens_ptr, slots_ptr, pending_ptr,
    window_ptr, log_ptr, out_ptr, num_tokens, num_reqs, log_len, channels, x_stride,
    window_stride, log_stride,
    WIDTH: tl.constexpr, GATED: tl.constexpr, SHORT: tl.constexpr, TILE: tl.constexpr,
    BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    let_next_start(PDL)
    if not SHORT:
        wait_for_inputs(PDL)
    begin, done, query_len, count, context, slot = read_tile(
        starts_ptr, contexts_ptr, seq_lens_ptr, slots_ptr, tl.program_id(0), num_reqs, SHORT, TILE
    )
    column = (tl.program_id(1) * BLOCK + tl.arange(0, BLOCK))[None, :]
    offset = (done + tl.arange(0, TILE))[:, None]
    inside = column < channels
    live = inside & (offset < count)
    short = query_len <= log_len
    owner = (count > 0) & (done == 0)
    kept = inside & owner & (context > 0)
    pending = load_early(pending_ptr + slot, mask=owner & (context > 0), other=0).to(tl.int32)
    window_ptr, log_ptr = window_ptr + slot * window_stride, log_ptr + slot * log_stride
    # Where the new window's inputs are, seen from the row's first token.
    shift = tl.where(short, 0, count)
    old = _kept_inputs(
        offset, column, kept & live, window_ptr, log_ptr, pending, channels, WIDTH
    )  # fmt: skip
    if SHORT and TILE == 1:
        moved = old  # before the only token
    else:
        moved = _kept_inputs(shift, column, kept, window_ptr, log_ptr, pending, channels, WIDTH)
    wait_for_inputs(PDL)

    total, x = _convolve(
        old, x_ptr + begin * x_stride, weight_ptr + column * WIDTH, bias_ptr, offset, column,
        inside, live, x_stride, channels, WIDTH, GATED, TILE, BLOCK,
    )  # fmt: skip
    if GATED:
        gate_ptr = x_ptr + (begin + offset) * x_stride + channels + column
        total *= tl.load(gate_ptr, mask=live, other=0.0).to(tl.float32)
    else:
        total = total / (1.0 + tl.exp(-total))
    target = out_ptr + (begin + offset) * channels + column
    tl.store(target, tl.where(live, total, 0.0), mask=inside & (offset < query_len))
    zero_rest(out_ptr, column, inside, starts_ptr, num_tokens, num_reqs, channels, TILE)

    if owner:
        window = _nothing()
        for tap in tl.static_range(WIDTH - 1):
            source = shift + (tap - (WIDTH - 1))
            new = _new_input(
                x_ptr, begin + source, column, inside & (source >= 0), x_stride, channels, GATED
            )
            window += (tl.where(source < 0, moved[tap], new),)
        tl.debug_barrier()  # other warps may still read what is written now
        for tap in tl.static_range(WIDTH - 1):
            tl.store(window_ptr + tap * channels + column, window[tap], mask=inside)
        tl.store(log_ptr + offset * channels + column, x, mask=live & short)


def _launch(
    x: Tensor, weight: Tensor, bias: Tensor | None, rows: list[Tensor], short: bool,
    window: Tensor, log: Tensor, out: Tensor, *, gated: bool,
) -> None:  # fmt: skip
    (num_tokens, channels), num_reqs = out.shape, rows[3].shape[0]
    log_len, width = log.shape[1], weight.shape[2]
    assert width in CONV_WIDTHS and 1 <= log_len <= MAX_ELEMENTS // 8, (width, log_len)
    assert x.stride(1) == 1 and out.is_contiguous() and weight.is_contiguous()
    assert window[0].is_contiguous() and log[0].is_contiguous()
    tile = triton.next_power_of_2(max(log_len, 1 if short else CHUNK_TOKENS))
    block = min(MAX_CHANNELS, MAX_ELEMENTS // tile, triton.next_power_of_2(channels))
    grid = (count_tiles(num_tokens, num_reqs, tile, short=short), triton.cdiv(channels, block))
    small = tile * x.element_size() <= FEW_BYTES
    few = short and small and grid[0] * grid[1] >= MANY_PROGRAMS
    _conv_kernel[grid](
        x, weight, bias, *rows, window, log, out, num_tokens, num_reqs, log_len, channels,
        x.stride(0), window.stride(0), log.stride(0),
        WIDTH=width, GATED=gated, SHORT=short, TILE=tile, BLOCK=block,
        num_warps=FEW_WARPS if few else WARPS,
        **overlapping(out),
    )  # fmt: skip


_ROWS = "Tensor query_start_loc, Tensor context_lens, Tensor seq_lens, Tensor slots, Tensor pending"
_STATE = "bool short, Tensor(a!) window, Tensor(b!) log, Tensor(c!) out"


@register(f"causal_conv_(Tensor x, Tensor weight, Tensor? bias, {_ROWS}, {_STATE}) -> ()")
def causal_conv_(
    x: Tensor, weight: Tensor, bias: Tensor | None, starts: Tensor, contexts: Tensor,
    seq_lens: Tensor, slots: Tensor, pending: Tensor, short: bool, window: Tensor, log: Tensor,
    out: Tensor,
) -> None:  # fmt: skip
    rows = [starts, contexts, seq_lens, slots, pending]
    _launch(x, weight, bias, rows, short, window, log, out, gated=False)


@register(f"gated_conv_(Tensor bcx, Tensor weight, Tensor? bias, {_ROWS}, {_STATE}) -> ()")
def gated_conv_(
    bcx: Tensor, weight: Tensor, bias: Tensor | None, starts: Tensor, contexts: Tensor,
    seq_lens: Tensor, slots: Tensor, pending: Tensor, short: bool, window: Tensor, log: Tensor,
    out: Tensor,
) -> None:  # fmt: skip
    rows = [starts, contexts, seq_lens, slots, pending]
    _launch(bcx, weight, bias, rows, short, window, log, out, gated=True)


def causal_conv(
    x: Tensor, weight: Tensor, bias: Tensor | None, rows: RecurrentRows, state: ConvState
) -> Tensor:
    """silu of the convolution. x: [tokens, channels], rows may lie apart"""
    out = x.new_empty(x.shape)
    causal_conv_(x, weight, bias, *rows.tensors, rows.short, state.window, state.log, out)
    return out


def gated_conv(
    bcx: Tensor, weight: Tensor, bias: Tensor | None, rows: RecurrentRows, state: ConvState
) -> Tensor:
    """C * conv(B * x). bcx: [tokens, 3 * channels]: B, C and x side by side"""
    out = bcx.new_empty(bcx.shape[0], bcx.shape[1] // 3)
    gated_conv_(bcx, weight, bias, *rows.tensors, rows.short, state.window, state.log, out)
    return out
