"""Mamba-2 by steps, for rows of a few tokens, and its gated norm; `mamba_scan.py` has prompts."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from stoop.ops.kernels.launch import (
    let_next_start,
    load_early,
    overlapping,
    wait_for_inputs,
)
from stoop.ops.kernels.mamba_parts import advance, fold, read_row, time_step
from stoop.ops.kernels.mamba_scan import ScanMemory, mamba_scan_
from stoop.ops.library import register
from stoop.ops.mamba import MambaState, MambaWeights
from stoop.ops.recurrent import RecurrentRows

# Rows of a head's state in a program of one warp: few, so that one request fills the GPU. Rows are
# independent of each other, so their number changes no bits. With more warps, Triton would divide a
# row among them.
STEP_ROWS = 8
TOKENS_AHEAD = 4  # loaded at once
MAX_WARPS = 16


@triton.jit
def _run_token(
    s, x, b, c, dt, rate, d, out_ptr, input_log_ptr, b_log_ptr, decay_log_ptr,
    row_exists, logged_columns, logs_decay,
):  # fmt: skip
    """Store a token's output and its log, and return the state after it.

    x: [rows, 1]; b, c: [1, columns]; pointers are to the places of this token
    """
    x, b = x.to(tl.float32), b.to(tl.float32)
    decay, scaled = tl.exp(rate * dt), x * dt
    s = advance(s, scaled, b, decay)
    y = tl.sum(s * c.to(tl.float32), axis=1, keep_dims=True) + d * x
    tl.store(out_ptr, y.to(out_ptr.dtype.element_ty), mask=row_exists)
    tl.store(input_log_ptr, scaled, mask=row_exists)
    tl.store(decay_log_ptr, decay, mask=logs_decay)
    tl.store(b_log_ptr, b, mask=logged_columns)
    return s


@triton.jit
def _run_tokens(
    s, live, context, rate, bias, d, dt_min, dt_max, x_ptr, b_ptr, c_ptr, dt_ptr, dt_stride,
    out_ptr, input_log_ptr, b_log_ptr, decay_log_ptr, row_exists, column_exists,
    logs_decay, logs_b,
    LOG: tl.constexpr, HEADS: tl.constexpr, INNER: tl.constexpr, B_SIZE: tl.constexpr,
    AHEAD: tl.constexpr,
):  # fmt: skip
    """Run a row's live tokens from state `s`. Pointers are to places of its first token, or to the
    first of the log."""
    WIDTH: tl.constexpr = INNER + 2 * B_SIZE
    for first in range(0, live, AHEAD):
        loaded = ()
        for i in tl.static_range(AHEAD):
            token, counts = first + i, first + i < live
            x = tl.load(x_ptr + token * WIDTH, mask=row_exists & counts, other=0.0)
            b = tl.load(b_ptr + token * WIDTH, mask=column_exists & counts, other=0.0)
            c = tl.load(c_ptr + token * WIDTH, mask=column_exists & counts, other=0.0)
            raw = tl.load(dt_ptr + token * dt_stride, mask=counts, other=0.0)
            loaded += ((x, b, c, raw),)  # type: ignore[assignment]
        for i in tl.static_range(AHEAD):
            if first + i < live:
                ring = (context + first + i) % (2 * LOG)
                s = _run_token(
                    s, loaded[i][0], loaded[i][1], loaded[i][2],
                    time_step(loaded[i][3], bias, dt_min, dt_max), rate, d,
                    out_ptr + (first + i) * INNER, input_log_ptr + (first + i) * INNER,
                    b_log_ptr + ring * B_SIZE, decay_log_ptr + ring * HEADS,
                    row_exists, column_exists & logs_b, logs_decay,
                )  # fmt: skip


@triton.jit(do_not_specialize=["num_tokens", "num_reqs"])
def _step_kernel(
    xbc_ptr, dt_ptr, a_log_ptr, dt_bias_ptr, d_ptr, dt_min, dt_max,
    starts_ptr, context_ptr, seq_len_ptr, slot_ptr, pending_ptr,
    matrix_ptr, input_log_ptr, b_log_ptr, decay_log_ptr, out_ptr, num_tokens, num_reqs,
    dt_stride, matrix_stride, input_stride, b_stride, decay_stride,
    ALONE: tl.constexpr, LOG: tl.constexpr, HEADS: tl.constexpr, GROUPS: tl.constexpr,
    HEAD_DIM: tl.constexpr, STATE: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    AHEAD: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """ROWS rows of a head's state, for one row of the batch, if it is short.

    ALONE: no other kernel serves the batch, so padding is zeroed here.
    """
    let_next_start(PDL)
    TILES: tl.constexpr = (HEAD_DIM + ROWS - 1) // ROWS
    INNER: tl.constexpr = HEADS * HEAD_DIM
    tile, head = tl.program_id(0) % TILES, tl.program_id(0) // TILES % HEADS
    row, group = tl.program_id(0) // (TILES * HEADS), head // (HEADS // GROUPS)
    # What earlier steps wrote was there before this kernel could start: see launch.py.
    begin, length, live, context, slot, pending = read_row(
        starts_ptr, context_ptr, seq_len_ptr, slot_ptr, pending_ptr, row, 0, LOG
    )
    rows, columns = tl.arange(0, ROWS)[:, None], tl.arange(0, COLUMNS)[None, :]
    row_exists, column_exists = tile * ROWS + rows < HEAD_DIM, columns < STATE
    inside, known = row_exists & column_exists, (live > 0) & (context > 0)
    at = head * HEAD_DIM + tile * ROWS  # the tile's first row, among those of all heads
    matrix_ptr += slot * matrix_stride + at * STATE
    input_log_ptr += slot * input_stride + at
    b_log_ptr += slot * b_stride + group * STATE
    decay_log_ptr += slot * decay_stride + head
    s = load_early(matrix_ptr + rows * STATE + columns, mask=inside & known, other=0.0)
    s = fold(
        s, pending, context, input_log_ptr, b_log_ptr, decay_log_ptr,
        rows, row_exists, columns, column_exists, LOG, INNER, GROUPS * STATE, HEADS, AHEAD,
    )  # fmt: skip
    rate = -tl.exp(tl.load(a_log_ptr + head).to(tl.float32))
    bias, d = tl.load(dt_bias_ptr + head).to(tl.float32), tl.load(d_ptr + head).to(tl.float32)
    end = load_early(starts_ptr + num_reqs)
    wait_for_inputs(PDL)
    tl.debug_barrier()  # all threads have read the log that is overwritten now

    if (live > 0) & ((pending > 0) | (context == 0)):
        tl.store(matrix_ptr + rows * STATE + columns, s, mask=inside)
    token = begin.to(tl.int64)
    xbc_ptr += token * (INNER + 2 * GROUPS * STATE)
    b_ptr, out = xbc_ptr + INNER + group * STATE + columns, out_ptr + at + rows
    _run_tokens(
        s, live, context, rate, bias, d, dt_min, dt_max,
        xbc_ptr + at + rows, b_ptr, b_ptr + GROUPS * STATE, dt_ptr + token * dt_stride + head,
        dt_stride, out + token * INNER, input_log_ptr + rows, b_log_ptr + columns, decay_log_ptr,
        row_exists, column_exists, tile == 0, (tile == 0) & (head % (HEADS // GROUPS) == 0),
        LOG, HEADS, INNER, GROUPS * STATE, AHEAD,
    )  # fmt: skip
    zero = tl.zeros((ROWS, 1), out_ptr.dtype.element_ty)
    for dead in range(live, length):
        tl.store(out + (token + dead) * INNER, zero, mask=row_exists)
    if ALONE:
        for padding in range(row, num_tokens - end, num_reqs):
            tl.store(out + (end.to(tl.int64) + padding) * INNER, zero, mask=row_exists)


@register(
    "mamba_step_(Tensor xbc, Tensor dt, Tensor a_log, Tensor dt_bias, Tensor d, float dt_min, "
    "float dt_max, Tensor query_start_loc, Tensor context_lens, Tensor seq_lens, Tensor slots, "
    "Tensor pending, Tensor(a!) matrix, Tensor(b!) input_log, Tensor(c!) b_log, "
    "Tensor(d!) decay_log, bool alone, Tensor(e!) out) -> ()"
)
def mamba_step_(
    xbc: Tensor,
    dt: Tensor,
    a_log: Tensor,
    dt_bias: Tensor,
    d: Tensor,
    dt_min: float,
    dt_max: float,
    query_start_loc: Tensor,
    context_lens: Tensor,
    seq_lens: Tensor,
    slots: Tensor,
    pending: Tensor,
    matrix: Tensor,
    input_log: Tensor,
    b_log: Tensor,
    decay_log: Tensor,
    alone: bool,
    out: Tensor,
) -> None:
    """Serve the short rows; `alone`: there are no others."""
    _, heads, head_dim, state = matrix.shape
    log_len, groups = b_log.shape[1], b_log.shape[3]
    rows = min(STEP_ROWS, triton.next_power_of_2(head_dim))
    num_reqs = slots.shape[0]
    # Without fused multiply-adds other than those in the code, a token's bits do not depend on how
    # many are unrolled.
    _step_kernel[(num_reqs * heads * triton.cdiv(head_dim, rows),)](
        xbc, dt, a_log, dt_bias, d, dt_min, dt_max,
        query_start_loc, context_lens, seq_lens, slots, pending,
        matrix, input_log, b_log, decay_log, out, xbc.shape[0], num_reqs,
        dt.stride(0), matrix.stride(0), input_log.stride(0), b_log.stride(0), decay_log.stride(0),
        ALONE=alone, LOG=log_len, HEADS=heads, GROUPS=groups, HEAD_DIM=head_dim, STATE=state,
        ROWS=rows, COLUMNS=triton.next_power_of_2(state), AHEAD=min(TOKENS_AHEAD, log_len),
        num_warps=1, enable_fp_fusion=False, **overlapping(out),
    )  # fmt: skip


def mamba(
    xbc: Tensor, dt: Tensor, weights: MambaWeights, rows: RecurrentRows, state: MambaState
) -> Tensor:
    """Run the recurrence over a step's tokens.

    xbc: [tokens, heads * head_dim + 2 * groups * state_size], contiguous, after convolution
    dt: [tokens, heads], rows may lie apart; returns [tokens, heads * head_dim]
    """
    _, heads, head_dim, _ = state.matrix.shape
    assert xbc.is_contiguous() and dt.stride(1) == 1
    out = xbc.new_empty(xbc.shape[0], heads * head_dim)
    limits = (weights.dt_min, weights.dt_max)
    inputs = (xbc, dt, weights.a_log, weights.dt_bias, weights.d, *limits, *rows.tensors)
    kept = (state.matrix, state.input_log, state.b_log, state.decay_log)
    for tensor in kept:
        assert tensor[0].is_contiguous() and tensor.dtype == torch.float32
    mamba_step_(*inputs, *kept, rows.short, out)
    if not rows.short:
        memory = ScanMemory.empty(xbc, state.matrix)
        mamba_scan_(*inputs, *kept, *memory.tensors, out)
    return out


@triton.jit
def _gated_norm_kernel(
    x_ptr, gate_ptr, weight_ptr, out_ptr, size, gate_stride, eps,
    BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One group of a token per program."""
    let_next_start(PDL)
    token, group = tl.program_id(0).to(tl.int64), tl.program_id(1)
    within = tl.arange(0, BLOCK)
    live, column = within < size, group * size + within
    weight = tl.load(weight_ptr + column, mask=live, other=0.0).to(tl.float32)
    wait_for_inputs(PDL)
    place = token * (tl.num_programs(1) * size) + column
    x = tl.load(x_ptr + place, mask=live, other=0.0).to(tl.float32)
    gate = tl.load(gate_ptr + token * gate_stride + column, mask=live, other=0.0).to(tl.float32)
    gated = x * (gate / (1.0 + tl.exp(-gate)))
    scale = tl.rsqrt(tl.sum(gated * gated, axis=0) / size + eps)
    normed = gated * scale * weight
    tl.store(out_ptr + place, normed.to(out_ptr.dtype.element_ty), mask=live)


@register(
    "gated_norm_(Tensor x, Tensor gate, Tensor weight, float eps, int groups, Tensor(a!) out) -> ()"
)
def gated_norm_(
    x: Tensor, gate: Tensor, weight: Tensor, eps: float, groups: int, out: Tensor
) -> None:
    """x and out: [tokens, n], contiguous; gate: [tokens, n]"""
    assert x.is_contiguous() and out.is_contiguous() and gate.stride(1) == 1
    size = x.shape[1] // groups
    block = triton.next_power_of_2(size)
    _gated_norm_kernel[(x.shape[0], groups)](
        x, gate, weight, out, size, gate.stride(0), eps,
        BLOCK=block, num_warps=min(MAX_WARPS, max(1, block // 512)), **overlapping(out),
    )  # fmt: skip


def gated_norm(x: Tensor, gate: Tensor, weight: Tensor, eps: float, groups: int = 1) -> Tensor:
    """RMSNorm of x * silu(gate), in groups of equal size, as Mamba-2 has it: the gate comes first.

    x: [tokens, n], contiguous; gate: [tokens, n], rows may lie apart; weight: [n]
    """
    out = torch.empty_like(x)
    gated_norm_(x, gate, weight, eps, groups, out)
    return out
