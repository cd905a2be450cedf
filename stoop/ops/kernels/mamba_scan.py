"""Mamba-2 over prompts: segments of a row side by side, and chunks of a segment one by one.

With f the running sum of log decays inside a chunk, u = dt x, and S0 the state before it:

    Y = e^f C S0 + tril(C B^T e^(f_i - f_j)) u + D x;  S = e^f_last S0 + B^T (e^(f_last - f) u)

After the decays, three launches serve a batch. The first computes the first segment of each row,
and of segments between the first and the last only what they add to the state. The second adds that
up. The third computes the other segments. A prompt of one segment is done after the first launch.

Grids depend on padded counts only; programs find their row and segment on the device.
"""

import math
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from stoop.ops.kernels.attention_parts import ROW_CHUNK, find_row
from stoop.ops.kernels.launch import INTERPRETED, overlapping, start_in_turn
from stoop.ops.kernels.mamba_parts import fold, read_row, time_step
from stoop.ops.library import register

DECAY_HEADS = 16
LOG2_E = tl.constexpr(math.log2(math.e))
# The second launch: elements of a state in a program, and segments loaded at once.
PASS_BLOCK, PASS_AHEAD = 1024, 4


@dataclass(frozen=True)
class ScanTiling:
    segment: int  # tokens
    chunk: int  # tokens
    block_p: int  # rows of a head's state
    num_warps: int
    num_stages: int


def scan_tiling(dtype: torch.dtype) -> ScanTiling:
    """float32 has no tensor cores, and float16 has more products: their tiles are smaller, to stay
    in registers. With 64 rows, triton 3.6 also makes wrong code for float16 (on an H200)."""
    if dtype == torch.float32:
        return ScanTiling(512, 16, 16, 8, 1)
    return (
        ScanTiling(512, 32, 32, 4, 1) if dtype == torch.float16 else ScanTiling(512, 64, 64, 4, 2)
    )


@triton.jit
def _product(a, b, acc, WIDE: tl.constexpr):
    if WIDE:
        a, b = a.to(tl.float32), b.to(tl.float32)
    return tl.dot(a, b, acc, input_precision="ieee")


@triton.jit
def _split(x):
    """Two bfloat16 whose sum has 16 bits of x, in the range of float32."""
    high = x.to(tl.bfloat16)
    return high, (x.to(tl.float32) - high.to(tl.float32)).to(tl.bfloat16)


@triton.jit
def _dot(a, b, acc, WIDE: tl.constexpr):
    """A product of which one side, states or decayed values, is float32, and the other the model's
    dtype. In half precision the float32 side is split, which takes as long as tf32 and is 2^5 times
    as precise; a float16, too, since bfloat16 has fewer bits."""
    if a.dtype == b.dtype:
        return _product(a, b, acc, WIDE)
    if a.dtype == tl.float32:
        high, low = _split(a)
        if b.dtype == tl.float16:
            b, rest = _split(b)
            acc = _product(high, rest, acc, WIDE)
        acc = _product(low, b, acc, WIDE)
        return _product(high, b, acc, WIDE)
    else:
        high, low = _split(b)
        if a.dtype == tl.float16:
            a, rest = _split(a)
            acc = _product(rest, high, acc, WIDE)
        acc = _product(a, low, acc, WIDE)
        return _product(a, high, acc, WIDE)


@triton.jit
def _run_segment(
    s, first, stop, live, d, inputs, out_ptr, tile,
    OUTPUTS: tl.constexpr, WIDTH: tl.constexpr, INNER: tl.constexpr, CHUNK: tl.constexpr,
    WIDE: tl.constexpr,
):  # fmt: skip
    """Run the tokens from first to stop, of which those before `live` count. Returns the state
    after them, and the sum of their log2 decays.

    s: [N, P]: columns come first. Pointers are to places of the row's first token.
    """
    x_ptr, b_ptr, c_ptr, dt_ptr, f_ptr = inputs
    rows, row_exists, columns, column_exists = tile  # [1, P] and [1, N]
    place = tl.arange(0, CHUNK)
    total = d * 0.0
    # A number plus the same offsets in every round: few registers.
    x_at, b_at = place[:, None] * WIDTH + rows, place[:, None] * WIDTH + columns
    for begin in range(first, stop, CHUNK):
        alive = place < live - begin
        dt = tl.load(dt_ptr + begin + place, mask=alive, other=0.0)
        f = tl.load(f_ptr + begin + place, mask=alive, other=0.0)
        f_last = tl.load(f_ptr + tl.minimum(begin + CHUNK, stop) - 1)
        x = tl.load(x_ptr + begin * WIDTH + x_at, mask=alive[:, None] & row_exists, other=0.0)
        seen_b = alive[:, None] & column_exists
        b = tl.load(b_ptr + begin * WIDTH + b_at, mask=seen_b, other=0.0)
        if OUTPUTS:
            c = tl.load(c_ptr + begin * WIDTH + b_at, mask=seen_b, other=0.0)
            y = tl.zeros((CHUNK, s.shape[1]), tl.float32)
            y = _dot(c, s, y, WIDE) * tl.exp2(f)[:, None]
            scores = tl.zeros((CHUNK, CHUNK), tl.float32)
            scores = _product(c, tl.trans(b), scores, WIDE)
            token = begin + place  # compared in every round, not kept in registers
            seen = token[:, None] >= token[None, :]
            faded = tl.exp2(tl.where(seen, f[:, None] - f[None, :], float("-inf")))
            scores *= faded * dt[None, :]
            y = _dot(scores, x, y, WIDE) + d * x.to(tl.float32)
            y = tl.where(alive[:, None], y, 0.0).to(out_ptr.dtype.element_ty)
            out = out_ptr + begin * INNER + (place[:, None] * INNER + rows)
            tl.store(out, y, mask=(place < stop - begin)[:, None] & row_exists)
        scaled = x.to(tl.float32) * (dt * tl.exp2(f_last - f))[:, None]
        s = _dot(tl.trans(b), scaled, s * tl.exp2(f_last), WIDE)
        total += f_last
    return s, total


@triton.jit(do_not_specialize=["num_tokens", "num_reqs"])
def _decay_kernel(
    dt_ptr, a_log_ptr, dt_bias_ptr, dt_min, dt_max, starts_ptr, context_ptr, seq_len_ptr,
    steps_ptr, fades_ptr, out_ptr, num_tokens, num_reqs, dt_stride,
    LOG: tl.constexpr, HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, CHUNK: tl.constexpr,
    BLOCK_H: tl.constexpr, BLOCK_D: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Time steps of one chunk of one row, and running sums of log2 decays, for some heads. And
    zeros, as the outputs of one chunk of the whole batch, where it is padding."""
    start_in_turn(PDL)
    end, chunk = tl.load(starts_ptr + num_reqs), tl.program_id(0) * CHUNK
    column = tl.program_id(1) * BLOCK_H * HEAD_DIM + tl.arange(0, BLOCK_D)
    written = (tl.arange(0, BLOCK_D) < BLOCK_H * HEAD_DIM) & (column < HEADS * HEAD_DIM)
    zero = tl.zeros((BLOCK_D,), out_ptr.dtype.element_ty)
    for padding in range(tl.maximum(chunk, end), tl.minimum(chunk + CHUNK, num_tokens)):
        out = out_ptr + padding * tl.full((), HEADS * HEAD_DIM, tl.int64) + column
        tl.store(out, zero, mask=written)
    row = find_row(starts_ptr, tl.program_id(0), num_reqs, CHUNK)
    begin = tl.load(starts_ptr + row)
    length = tl.load(starts_ptr + row + 1) - begin
    first = (tl.program_id(0) - begin // CHUNK - row) * CHUNK
    if (length > LOG) & (first < length):
        live = tl.load(seq_len_ptr + row) - tl.load(context_ptr + row)
        head = (tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H))[None, :]
        token, exists = (first + tl.arange(0, CHUNK))[:, None], head < HEADS
        place, alive = begin.to(tl.int64) + token, (token < live) & exists
        raw = tl.load(dt_ptr + place * dt_stride + head, mask=alive, other=0.0)
        bias = tl.load(dt_bias_ptr + head, mask=exists, other=0.0)
        rate = -LOG2_E * tl.exp(tl.load(a_log_ptr + head, mask=exists, other=0.0))
        dt = tl.where(alive, time_step(raw, bias, dt_min, dt_max), 0.0)
        at, inside = head.to(tl.int64) * num_tokens + place, (token < length) & exists
        tl.store(steps_ptr + at, dt, mask=inside)
        tl.store(fades_ptr + at, tl.cumsum(rate * dt, 0), mask=inside)


@triton.jit
def _pointers(
    xbc_ptr, steps_ptr, fades_ptr, begin, num_tokens, head, at, group,
    INNER: tl.constexpr, GROUPS: tl.constexpr, STATE: tl.constexpr,
):  # fmt: skip
    """To x, B, C, dt and f of a row's first token."""
    token = begin.to(tl.int64)
    x_ptr = xbc_ptr + token * (INNER + 2 * GROUPS * STATE)
    b_ptr, decay = x_ptr + INNER + group * STATE, head.to(tl.int64) * num_tokens + token
    return x_ptr + at, b_ptr, b_ptr + GROUPS * STATE, steps_ptr + decay, fades_ptr + decay


@triton.jit(do_not_specialize=["num_tokens", "num_reqs"])
def _scan_kernel(
    xbc_ptr, d_ptr, starts_ptr, context_ptr, seq_len_ptr, slot_ptr, pending_ptr,
    matrix_ptr, input_log_ptr, b_log_ptr, decay_log_ptr, steps_ptr, fades_ptr, states_ptr,
    totals_ptr, out_ptr, num_tokens, num_reqs, matrix_stride, input_stride, b_stride, decay_stride,
    FIRST: tl.constexpr, LOG: tl.constexpr, HEADS: tl.constexpr, GROUPS: tl.constexpr,
    HEAD_DIM: tl.constexpr, STATE: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_N: tl.constexpr,
    SEGMENT: tl.constexpr, CHUNK: tl.constexpr, WIDE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """BLOCK_P rows of a head's state, over one segment of one row of the batch, if it is long.

    FIRST: this is the first launch, not the third
    """
    start_in_turn(PDL)
    TILES: tl.constexpr = (HEAD_DIM + BLOCK_P - 1) // BLOCK_P
    INNER: tl.constexpr = HEADS * HEAD_DIM
    WIDTH: tl.constexpr = INNER + 2 * GROUPS * STATE
    tile, head = tl.program_id(0) % TILES, tl.program_id(0) // TILES % HEADS
    segment, group = tl.program_id(0) // (TILES * HEADS), head // (HEADS // GROUPS)
    rows, columns = tl.arange(0, BLOCK_P)[None, :], tl.arange(0, BLOCK_N)[None, :]
    place = (rows, tile * BLOCK_P + rows < HEAD_DIM, columns, columns < STATE)
    at = head * HEAD_DIM + tile * BLOCK_P  # the tile's first row, among those of all heads
    row = find_row(starts_ptr, segment, num_reqs, SEGMENT)
    begin, length, live, context, slot, pending = read_row(
        starts_ptr, context_ptr, seq_len_ptr, slot_ptr, pending_ptr, row, LOG + 1, 0
    )
    base = begin // SEGMENT  # the place of the row's first state among those after segments
    nth, last = segment - base - row, tl.cdiv(live, SEGMENT) - 1
    first, stop = nth * SEGMENT, tl.minimum((nth + 1) * SEGMENT, length)
    d, out_ptr = tl.load(d_ptr + head).to(tl.float32), out_ptr + begin.to(tl.int64) * INNER + at
    inputs = _pointers(
        xbc_ptr, steps_ptr, fades_ptr, begin, num_tokens, head, at, group, INNER, GROUPS, STATE
    )
    column = tl.arange(0, BLOCK_N)[:, None]
    inside, tile_at = place[1] & (column < STATE), rows * STATE + column
    matrix_ptr += slot * matrix_stride + at * STATE
    states_ptr += (base + nth).to(tl.int64) * (INNER * STATE) + at * STATE
    if (first < length) & ((nth == 0) if FIRST else (nth > 0)):
        if FIRST:
            s = tl.load(matrix_ptr + tile_at, inside & (live > 0) & (context > 0), other=0.0)
            input_log_ptr += slot * input_stride + at
            b_log_ptr += slot * b_stride + group * STATE
            decay_log_ptr += slot * decay_stride + head
            s = fold(
                s, pending, context, input_log_ptr, b_log_ptr, decay_log_ptr,
                rows, place[1], column, column < STATE, LOG, INNER, GROUPS * STATE, HEADS, 1,
            )  # fmt: skip
        else:
            s = tl.load(states_ptr - INNER * STATE + tile_at, inside & (nth <= last), other=0.0)
        s, _ = _run_segment(
            s, first, stop, live, d, inputs, out_ptr, place, True, WIDTH, INNER, CHUNK, WIDE
        )
        tl.store(matrix_ptr + tile_at, s, mask=inside & (nth == last))
        tl.store(states_ptr + tile_at, s, mask=inside & FIRST & (last > 0))
    elif FIRST & (nth > 0) & (nth < last):
        s, total = _run_segment(
            tl.zeros((BLOCK_N, BLOCK_P), tl.float32),
            first, stop, live, d, inputs, out_ptr, place, False, WIDTH, INNER, CHUNK, WIDE,
        )  # fmt: skip
        tl.store(states_ptr + tile_at, s, mask=inside)
        tl.store(totals_ptr + (base + nth) * HEADS + head, total, mask=tile == 0)


@triton.jit(do_not_specialize=["num_reqs"])
def _pass_kernel(
    starts_ptr, context_ptr, seq_len_ptr, states_ptr, totals_ptr, num_reqs,
    LOG: tl.constexpr, HEADS: tl.constexpr, SIZE: tl.constexpr, SEGMENT: tl.constexpr,
    BLOCK: tl.constexpr, AHEAD: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """A block of a head's state, after all segments of a row but the last.

    Only rows of three segments or more need this. Such a row has a token whose number is a multiple
    of two segments: the program of its first one serves it.
    """
    start_in_turn(PDL)
    token, head = tl.program_id(0) * 2 * SEGMENT, tl.program_id(1)
    row = _row_at(starts_ptr, token, num_reqs)
    begin = tl.load(starts_ptr + row)
    length = tl.load(starts_ptr + row + 1) - begin
    live = tl.minimum(tl.load(seq_len_ptr + row) - tl.load(context_ptr + row), length)
    last, base = tl.cdiv(live, SEGMENT) - 1, begin // SEGMENT
    place = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
    exists = place < SIZE
    states_ptr += base.to(tl.int64) * (HEADS * SIZE) + head * SIZE + place
    if (begin + 2 * SEGMENT > token) & (length > LOG) & (last >= 2):
        s = tl.load(states_ptr, mask=exists, other=0.0)
        for first in range(1, last, AHEAD):
            loaded = ()
            for i in tl.static_range(AHEAD):
                nth = first + i
                total = tl.load(totals_ptr + (base + nth) * HEADS + head, nth < last, other=0.0)
                state = states_ptr + nth * (HEADS * SIZE)
                added = tl.load(state, mask=exists & (nth < last), other=0.0)
                loaded += ((tl.exp2(total), added),)  # type: ignore[assignment]
            for i in tl.static_range(AHEAD):
                s = s * loaded[i][0] + loaded[i][1]
                state = states_ptr + (first + i) * (HEADS * SIZE)
                tl.store(state, s, mask=exists & (first + i < last))


@triton.jit
def _row_at(starts_ptr, token, num_reqs):
    """The last row that starts at or before a token."""
    row = -1
    for begin in range(0, num_reqs, ROW_CHUNK):
        number = begin + tl.arange(0, ROW_CHUNK)
        start = tl.load(starts_ptr + number, mask=number < num_reqs, other=0)
        row += tl.sum(((start <= token) & (number < num_reqs)).to(tl.int32), 0)
    return row


@dataclass(frozen=True)
class ScanMemory:
    """What the launches hand on, in float32."""

    steps: Tensor  # [heads, tokens]: dt
    fades: Tensor  # [heads, tokens]: running sums of log2 decays in a chunk
    states: Tensor  # [segments, heads, head_dim, state_size]: after segments
    totals: Tensor  # [segments, heads]: sums of log2 decays in a segment

    @classmethod
    def empty(cls, xbc: Tensor, matrix: Tensor) -> "ScanMemory":
        num_tokens, heads = xbc.shape[0], matrix.shape[1]
        segments = triton.cdiv(num_tokens, scan_tiling(xbc.dtype).segment)
        return cls(
            matrix.new_empty(heads, num_tokens),
            matrix.new_empty(heads, num_tokens),
            matrix.new_empty(segments, *matrix.shape[1:]),
            matrix.new_empty(segments, heads),
        )

    @property
    def tensors(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        return self.steps, self.fades, self.states, self.totals


@register(
    "mamba_scan_(Tensor xbc, Tensor dt, Tensor a_log, Tensor dt_bias, Tensor d, float dt_min, "
    "float dt_max, Tensor query_start_loc, Tensor context_lens, Tensor seq_lens, Tensor slots, "
    "Tensor pending, Tensor(a!) matrix, Tensor input_log, Tensor b_log, Tensor decay_log, "
    "Tensor(b!) steps, Tensor(c!) fades, Tensor(d!) states, Tensor(e!) totals, Tensor(f!) out) "
    "-> ()"
)
def mamba_scan_(
    xbc: Tensor,
    dt: Tensor,
    a_log: Tensor,
    dt_bias: Tensor,
    d: Tensor,
    dt_min: float,
    dt_max: float,
    *rest: Tensor,
) -> None:
    """Serve the rows that are not short, and zero padding."""
    starts, contexts, seq_lens, slots, _, matrix, input_log, b_log, decay_log, *memory, out = rest
    steps, fades, states, totals = memory
    _, heads, head_dim, state = matrix.shape
    log_len, groups = b_log.shape[1], b_log.shape[3]
    tiling, num_reqs, num_tokens = scan_tiling(xbc.dtype), slots.shape[0], xbc.shape[0]
    chunk, segment, options = tiling.chunk, tiling.segment, overlapping(xbc)
    _decay_kernel[(triton.cdiv(num_tokens, chunk) + num_reqs, triton.cdiv(heads, DECAY_HEADS))](
        dt, a_log, dt_bias, dt_min, dt_max, starts, contexts, seq_lens, steps, fades, out,
        num_tokens, num_reqs, dt.stride(0),
        LOG=log_len, HEADS=heads, HEAD_DIM=head_dim, CHUNK=chunk, BLOCK_H=DECAY_HEADS,
        BLOCK_D=triton.next_power_of_2(DECAY_HEADS * head_dim), num_warps=4, **options,
    )  # fmt: skip

    def scan(first: bool) -> None:
        block_p = min(tiling.block_p, max(16, triton.next_power_of_2(head_dim)))
        tiles = heads * triton.cdiv(head_dim, block_p)
        _scan_kernel[((triton.cdiv(num_tokens, segment) + num_reqs) * tiles,)](
            xbc, d, *rest, num_tokens, num_reqs,
            *(each.stride(0) for each in (matrix, input_log, b_log, decay_log)),
            FIRST=first, LOG=log_len, HEADS=heads, GROUPS=groups, HEAD_DIM=head_dim, STATE=state,
            BLOCK_P=block_p, BLOCK_N=max(16, triton.next_power_of_2(state)),
            SEGMENT=segment, CHUNK=chunk, WIDE=INTERPRETED or xbc.dtype == torch.float32,
            num_warps=tiling.num_warps, num_stages=tiling.num_stages, **options,
        )  # fmt: skip

    scan(first=True)
    if num_tokens > 2 * segment:
        blocks = triton.cdiv(head_dim * state, PASS_BLOCK)
        _pass_kernel[(triton.cdiv(num_tokens, 2 * segment), heads, blocks)](
            starts, contexts, seq_lens, states, totals, num_reqs,
            LOG=log_len, HEADS=heads, SIZE=head_dim * state, SEGMENT=segment, BLOCK=PASS_BLOCK,
            AHEAD=PASS_AHEAD, num_warps=4, **options,
        )  # fmt: skip
    if num_tokens > segment:
        scan(first=False)
