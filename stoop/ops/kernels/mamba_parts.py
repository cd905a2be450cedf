"""Parts of the Mamba-2 kernels: time steps, a row's numbers, and the fold of logged tokens.

Logs are read by programs of several heads, and tokens of the same step are written to them. So B
and decays lie in a ring by the position of their token, with room for two steps: what is read and
what is written are never the same places. `dt * x` has one owner and needs no ring.
"""

import triton
import triton.language as tl

from stoop.ops.kernels.launch import load_early


@triton.jit
def softplus(x):
    """log(1 + exp(x)), with the relative precision of float32 also where it is small."""
    fading = tl.exp(-tl.abs(x))
    ratio = fading / (2.0 + fading)  # log(1 + y) = 2 artanh(y / (2 + y)), which is at most 1/3
    square = ratio * ratio
    series = 1 / 11 + square * (1 / 13)
    series = 1 / 9 + square * series
    series = 1 / 7 + square * series
    series = 1 / 5 + square * series
    series = 1 / 3 + square * series
    return tl.maximum(x, 0.0) + 2.0 * (ratio + ratio * square * series)


@triton.jit
def time_step(raw, bias, dt_min, dt_max):
    return tl.minimum(tl.maximum(softplus(raw.to(tl.float32) + bias), dt_min), dt_max)


@triton.jit
def read_row(
    starts_ptr, context_ptr, seq_len_ptr, slot_ptr, pending_ptr, row, SHORTEST: tl.constexpr,
    LONGEST: tl.constexpr,
):  # fmt: skip
    """Return first token, query tokens, live ones, context, slot and pending tokens of a row.

    A row that has not SHORTEST to LONGEST query tokens (0: any number) is read as one without any.
    """
    begin = load_early(starts_ptr + row)
    length = load_early(starts_ptr + row + 1) - begin
    served = length >= SHORTEST
    if LONGEST:
        served &= length <= LONGEST
    length = tl.where(served, length, 0)
    context = load_early(context_ptr + row)
    live = tl.minimum(tl.maximum(load_early(seq_len_ptr + row) - context, 0), length)
    slot = load_early(slot_ptr + row)
    kept = (live > 0) & (context > 0)
    pending = load_early(pending_ptr + slot, mask=kept, other=0).to(tl.int32)
    return begin, length, live, context, slot, pending


@triton.jit
def fold(
    s, pending, context, input_ptr, b_ptr, decay_ptr, rows, row_exists, columns, column_exists,
    LOG: tl.constexpr, INPUTS: tl.constexpr, B_SIZE: tl.constexpr, HEADS: tl.constexpr,
    AHEAD: tl.constexpr,
):  # fmt: skip
    """Apply the pending logged tokens to a tile of a head's state.

    rows, columns: places in the tile, in shapes that broadcast to its shape. Pointers are to the
    slot's logs, at the tile's first row, the group and the head. INPUTS, B_SIZE, HEADS: elements of
    a logged token. AHEAD tokens are loaded at once.
    """
    for first in range(0, pending, AHEAD):
        loaded = ()
        for i in tl.static_range(AHEAD):
            place, counts = first + i, first + i < pending
            ring = (context - pending + place) % (2 * LOG)
            x = load_early(input_ptr + place * INPUTS + rows, mask=row_exists & counts, other=0.0)
            b = load_early(b_ptr + ring * B_SIZE + columns, mask=column_exists & counts, other=0.0)
            decay = load_early(decay_ptr + ring * HEADS, mask=counts, other=1.0)
            loaded += ((x, b, decay),)  # type: ignore[assignment]
        for i in tl.static_range(AHEAD):
            if first + i < pending:
                s = advance(s, loaded[i][0], loaded[i][1], loaded[i][2])
    return s


@triton.jit
def advance(s, x, b, decay):
    """The state after one more token. Every kernel that folds or decodes uses this, so that states
    have the same bits. x: dt * x"""
    return tl.fma(x, b, s * decay)
