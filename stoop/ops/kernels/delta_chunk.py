"""The delta rule for long rows, in chunks of 64 tokens.

With g the log-decays of a chunk summed up to each token, and S the state before it:

    A_ij = beta_i (k_i . k_j) e^(g_i - g_j), j < i        T = (I + A)^-1
    W = T diag(beta e^g) K        U = T diag(beta) V      u = U - W S
    P_ij = (q_i . k_j) e^(g_i - g_j), j <= i
    out = diag(e^g) Q S + P u     new S = e^(g_last) S + (diag(e^(g_last - g)) K)^T u

`prepare_kernel` computes W, U and P of all chunks at once. `scan_kernel` then walks through the
chunks of a row, with some columns of a head's state in registers. Exponents are never above 0.

The norms of q and k are factors of rows, so products are of q and k as the model rounded them: in
half precisions these are exact on tensor cores. State, u, T, W and P are float32, and as operands
tf32, unless the model is float32.
"""

import triton
import triton.language as tl

from stoop.ops.kernels.attention_parts import row_of
from stoop.ops.kernels.choice import DELTA_CHUNK
from stoop.ops.kernels.delta_step import EPS, load_state, log_decay, sigmoid
from stoop.ops.kernels.launch import load_early, start_in_turn
from stoop.ops.kernels.recurrent import read_tile

CHUNK = tl.constexpr(DELTA_CHUNK)
PART = tl.constexpr(16)  # of a chunk: diagonal blocks are inverted row by row
ROW_CHUNK = tl.constexpr(64)  # rows that a program looks at together


@triton.jit
def _decayed_products(x, y, x_scale, y_scale, g, wanted, WIDE: tl.constexpr):
    """(x_i . y_j) e^(g_i - g_j) where wanted, else 0. There the exponent is at most 0.

    WIDE: in float32, as the interpreter needs it
    """
    if WIDE:
        x, y = x.to(tl.float32), y.to(tl.float32)
    products = tl.dot(x, tl.trans(y), input_precision="tf32x3")
    products *= x_scale[:, None] * y_scale[None, :]
    decay = tl.exp(tl.where(wanted, g[:, None] - g[None, :], 0.0).to(tl.float32))
    return tl.where(wanted, products * decay, 0.0)


@triton.jit
def _inverse_rows(m_ptr, stride, count):
    """Replace the diagonal blocks of A by the inverses of I + A, all blocks at once.

    m_ptr: [CHUNK, CHUNK], of which `count` rows exist; row after row by substitution
    """
    block = tl.arange(0, CHUNK // PART)[:, None, None]
    row = tl.arange(0, PART)[None, :, None]
    column = tl.arange(0, PART)[None, None, :]
    inverse = tl.where((row == column) & (block >= 0), 1.0, 0.0)
    for index in range(1, PART):
        # A's row `index` of each block, along the rows of the inverse
        source = m_ptr + (block * PART + index) * stride + block * PART + row
        factor = tl.load(source, mask=block * PART + index < count, other=0.0)
        change = tl.sum(factor * inverse, 1)[:, None, :]
        inverse = tl.where(row == index, inverse - change, inverse)
    tl.debug_barrier()
    target = m_ptr + (block * PART + row) * stride + block * PART + column
    tl.store(target, inverse, mask=block * PART + row < count)
    tl.debug_barrier()


@triton.jit
def _join_inverses(m_ptr, stride, first, count, SIZE: tl.constexpr):
    """Two inverted blocks on the diagonal, from `first` on, become one: what is below them on the
    left is multiplied by both."""
    row = tl.arange(0, SIZE)[:, None]
    column = tl.arange(0, SIZE)[None, :]
    upper_ptr = m_ptr + (first + row) * stride + first + column
    below_ptr = m_ptr + (first + SIZE + row) * stride + first + column
    above = tl.load(upper_ptr, mask=first + row < count, other=0.0)
    inside = first + SIZE + row < count
    below = tl.load(below_ptr, mask=inside, other=0.0)
    right = tl.load(below_ptr + SIZE, mask=inside, other=0.0)
    product = tl.dot(below, above, input_precision="ieee")
    product = -tl.dot(right, product, input_precision="ieee")
    tl.debug_barrier()
    tl.store(below_ptr, product, mask=inside)


@triton.jit
def _invert(m_ptr, a, stride, count):
    """(I + A)^-1 of a strictly lower A, [CHUNK, CHUNK], with rows up to `count`.

    m_ptr: memory of this program for it, rows `stride` apart; free again afterwards
    """
    place = tl.arange(0, CHUNK)
    whole_ptr = m_ptr + place[:, None] * stride + tl.arange(0, CHUNK)[None, :]
    live = (place < count)[:, None]
    tl.store(whole_ptr, a, mask=live)
    tl.debug_barrier()
    _inverse_rows(m_ptr, stride, count)
    _join_inverses(m_ptr, stride, 0, count, PART)
    _join_inverses(m_ptr, stride, 2 * PART, count, PART)
    tl.debug_barrier()
    _join_inverses(m_ptr, stride, 0, count, 2 * PART)
    tl.debug_barrier()
    inverse = tl.load(whole_ptr, mask=live, other=0.0)
    tl.debug_barrier()
    return inverse


@triton.jit
def _sum_decays(a_ptr, stride, live, a_log_ptr, dt_bias_ptr):
    """The log-decays up to each token of a chunk. A strong decay makes these sums large, and their
    differences matter: in float64."""
    a = tl.load(a_ptr + tl.arange(0, CHUNK) * stride, mask=live, other=0.0)
    a_log, dt_bias = tl.load(a_log_ptr).to(tl.float32), tl.load(dt_bias_ptr).to(tl.float32)
    g = tl.where(live, log_decay(a, a_log, dt_bias), 0.0).to(tl.float64)
    return tl.cumsum(g, 0), tl.sum(g, 0)


@triton.jit
def _norm_scale(x):
    """What a row is multiplied by in its norm."""
    wide = x.to(tl.float32)
    return tl.rsqrt(tl.sum(wide * wide, 1) + EPS)


@triton.jit(do_not_specialize=["num_reqs", "log_len"])
def prepare_kernel(
    qkv_ptr, b_ptr, a_ptr, a_log_ptr, dt_bias_ptr, starts_ptr, contexts_ptr, seq_lens_ptr,
    slots_ptr, w_ptr, u_ptr, p_ptr, scales_ptr, num_reqs, log_len, b_stride, a_stride,
    scales_stride,
    HV: tl.constexpr, HK: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr,
    PRECISION: tl.constexpr, WIDE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One head of one chunk.

    w: [tokens, HV, DK], u: [tokens, HV, DV], p: [tokens, HV, CHUNK] float32; p has A and T first
    scales: [3, tokens, HV] float32: of queries, of keys, and of the state over the chunk
    """
    start_in_turn(PDL)
    head = tl.program_id(1)
    begin, done, query_len, count, _, _ = read_tile(
        starts_ptr, contexts_ptr, seq_lens_ptr, slots_ptr, tl.program_id(0), num_reqs, False, CHUNK
    )
    count = tl.minimum(tl.where(query_len > log_len, count, 0) - done, CHUNK)
    if count <= 0:
        return
    # Pointers are of the chunk's first token, at the columns of the head.
    begin += done
    CHANNELS: tl.constexpr = 2 * HK * DK + HV * DV
    place, other = tl.arange(0, CHUNK), tl.arange(0, CHUNK)[None, :]
    live, inside = place < count, (place < count)[:, None]
    in_k = place[:, None] * CHANNELS + tl.arange(0, DK)[None, :]
    in_v = place[:, None] * CHANNELS + tl.arange(0, DV)[None, :]
    q_ptr = qkv_ptr + begin * CHANNELS + head // (HV // HK) * DK
    v_ptr = qkv_ptr + begin * CHANNELS + 2 * HK * DK + head * DV
    m_ptr = p_ptr + (begin * HV + head) * CHUNK
    g, total = _sum_decays(
        a_ptr + begin * a_stride + head, a_stride, live, a_log_ptr + head, dt_bias_ptr + head
    )
    scale = tl.exp(g.to(tl.float32))
    b_ptr += begin * b_stride + head
    beta = sigmoid(tl.load(b_ptr + place * b_stride, mask=live, other=0.0))
    k = tl.load(q_ptr + HK * DK + in_k, mask=inside, other=0.0)
    k_scale = _norm_scale(k)
    below = place[:, None] > other
    pairs = _decayed_products(k, k, beta * k_scale, k_scale, g, below, WIDE)
    inverse = _invert(m_ptr, pairs, HV * CHUNK, count) * beta[None, :]

    v = tl.load(v_ptr + in_v, mask=inside, other=0.0).to(tl.float32)
    u = tl.dot(inverse, v, input_precision=PRECISION)
    in_u = place[:, None] * (HV * DV) + tl.arange(0, DV)[None, :]
    tl.store(u_ptr + (begin * HV + head) * DV + in_u, u, mask=inside)
    # Again: to keep it until here would take many registers.
    k = tl.load(q_ptr + HK * DK + in_k, mask=inside, other=0.0)
    inverse *= (scale * k_scale)[None, :]
    w = tl.dot(inverse, k.to(tl.float32), input_precision=PRECISION)
    in_w = place[:, None] * (HV * DK) + tl.arange(0, DK)[None, :]
    tl.store(w_ptr + (begin * HV + head) * DK + in_w, w, mask=inside)
    q = tl.load(q_ptr + in_k, mask=inside, other=0.0)
    q_scale = _norm_scale(q) * (DK**-0.5)
    pairs = _decayed_products(q, k, q_scale, k_scale, g, place[:, None] >= other, WIDE)
    tl.store(m_ptr + place[:, None] * (HV * CHUNK) + other, pairs, mask=inside)
    scale_ptr = scales_ptr + begin * HV + head + place * HV
    tl.store(scale_ptr, q_scale * scale, mask=live)
    tl.store(scale_ptr + scales_stride, k_scale * tl.exp((total - g).to(tl.float32)), mask=live)
    tl.store(scale_ptr + 2 * scales_stride, tl.exp((total + g * 0.0).to(tl.float32)), mask=live)


@triton.jit
def _long_row(starts_ptr, rank, num_reqs, log_len):
    """The long row with so many long ones before it, or num_reqs."""
    row = 0
    seen = 0
    for begin in range(0, num_reqs, ROW_CHUNK):
        number = begin + tl.arange(0, ROW_CHUNK)
        start = tl.load(starts_ptr + number, mask=number < num_reqs, other=0)
        end = tl.load(starts_ptr + number + 1, mask=number < num_reqs, other=0)
        long = (end - start > log_len).to(tl.int32)
        before = seen + tl.cumsum(long, 0)
        row += tl.sum(((before <= rank) & (number < num_reqs)).to(tl.int32), 0)
        seen += tl.sum(long, 0)
    return row


@triton.jit
def _times(x, y, PRECISION: tl.constexpr, WIDE: tl.constexpr):
    """x y, of x in float32 and y as the model rounded it. In half precisions x becomes the sum of
    two parts, which is more exact than tf32, and y need not be converted."""
    if WIDE or y.dtype == tl.float32:
        return tl.dot(x, y.to(tl.float32), input_precision=PRECISION)
    upper = x.to(y.dtype)
    lower = (x - upper.to(tl.float32)).to(y.dtype)
    return tl.dot(upper, y, tl.dot(lower, y))


@triton.jit
def _scan_chunk(
    state, qkv_ptr, w_ptr, raw_ptr, p_ptr, scales_ptr, first, count, head, column, scales_stride,
    HV: tl.constexpr, HK: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr,
    PRECISION: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """Write a chunk's outputs in place of U; returns the state after it.

    state: [BV, DK], transposed. All products have BV rows: too few for wgmma, of which triton 3.6
    makes wrong code here (compute-sanitizer on an H200: it reads past shared memory).
    first: its first token, count: from there to the row's end
    """
    place = tl.arange(0, CHUNK)
    live = place < count
    inside = live[None, :]
    dim, other = tl.arange(0, DK), tl.arange(0, CHUNK)
    CHANNELS: tl.constexpr = 2 * HK * DK + HV * DV
    token = first + place
    line = token * HV + head
    in_qkv = token * CHANNELS + head // (HV // HK) * DK
    u_ptr = raw_ptr + (line[None, :] * DV + column[:, None])
    w = tl.load(w_ptr + (line[:, None] * DK + dim[None, :]), mask=live[:, None], other=0.0)
    u = tl.load(u_ptr, mask=inside, other=0.0)
    scale_ptr = scales_ptr + line
    q_scale = tl.load(scale_ptr, mask=live, other=0.0)
    k_scale = tl.load(scale_ptr + scales_stride, mask=live, other=0.0)
    total = tl.load(scales_ptr + (first * HV + head + 2 * scales_stride))
    update = u - tl.dot(state, tl.trans(w), input_precision=PRECISION)
    q_ptr = qkv_ptr + (in_qkv[:, None] + dim[None, :])
    q = tl.load(q_ptr, mask=live[:, None], other=0.0)
    out = _times(state, tl.trans(q), PRECISION, WIDE) * q_scale[None, :]
    p_at = p_ptr + (line[:, None] * CHUNK + other[None, :])
    p = tl.load(p_at, mask=live[:, None], other=0.0)
    out = tl.dot(update, tl.trans(p), out, input_precision=PRECISION)
    tl.store(u_ptr, out, mask=inside)
    k = tl.load(q_ptr + HK * DK, mask=live[:, None], other=0.0)
    return state * total + _times(update * k_scale[None, :], k, PRECISION, WIDE)


@triton.jit(do_not_specialize=["num_reqs", "log_len"])
def scan_kernel(
    qkv_ptr, starts_ptr, contexts_ptr, seq_lens_ptr, slots_ptr, pending_ptr, matrix_ptr,
    key_log_ptr, update_log_ptr, decay_log_ptr, w_ptr, raw_ptr, p_ptr, scales_ptr, num_reqs,
    log_len, scales_stride, matrix_stride, key_log_stride, update_log_stride, decay_log_stride,
    HV: tl.constexpr, HK: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr, BV: tl.constexpr,
    STAGES: tl.constexpr, PRECISION: tl.constexpr, WIDE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Some columns of one head, of every n-th long row: n rows are worked on together."""
    start_in_turn(PDL)
    head = tl.program_id(0) // (DV // BV)
    column = tl.program_id(0) % (DV // BV) * BV + tl.arange(0, BV)
    rank = tl.program_id(1)
    row = _long_row(starts_ptr, rank, num_reqs, log_len)
    while row < num_reqs:
        begin, _, context, seq_len = row_of(starts_ptr, contexts_ptr, seq_lens_ptr, row)
        count = seq_len - context
        slot = load_early(slots_ptr + row)
        kept = (count > 0) & (context > 0)
        pending = load_early(pending_ptr + slot, mask=kept, other=0).to(tl.int32)
        state = load_state(
            matrix_ptr, key_log_ptr, update_log_ptr, decay_log_ptr, matrix_stride, key_log_stride,
            update_log_stride, decay_log_stride, slot, head, column, pending, kept, HV, HK, DK, DV,
        )  # fmt: skip
        state = tl.trans(state)
        for done in tl.range(0, count, CHUNK, num_stages=STAGES):
            state = _scan_chunk(
                state, qkv_ptr, w_ptr, raw_ptr, p_ptr, scales_ptr, begin + done,
                count - done, head, column, scales_stride, HV, HK, DK, DV, PRECISION, WIDE,
            )  # fmt: skip
        line = (head * DK + tl.arange(0, DK))[:, None] * DV + column[None, :]
        tl.store(matrix_ptr + slot * matrix_stride + line, tl.trans(state), mask=count > 0)
        rank += tl.num_programs(1)
        row = _long_row(starts_ptr, rank, num_reqs, log_len)
