"""The delta rule for short rows, token by token, and what follows for all rows: norm, gate and log.

A program of `step_kernel` has some columns of one head's state in registers. It folds the pending
tokens, stores the checkpoint and computes the row's tokens. Columns are independent of each other,
so nothing that moves the state depends on how many programs share a head. Decayed state, keys and
updates meet in the same two operations when a token is computed and when it is folded (`move`): the
bits are the same.

Programs that share a head read its logged keys and decays, so none of them may write new ones. They
put them into scratch, and `finish_kernel` moves them to the log.
"""

import triton
import triton.language as tl

from stoop.ops.delta_net import L2_EPS
from stoop.ops.kernels.launch import (
    let_next_start,
    load_early,
    wait_for_inputs,
)
from stoop.ops.kernels.recurrent import read_tile, zero_rest

EPS = tl.constexpr(L2_EPS)


@triton.jit
def move(state, decay, key, update):
    """A token's effect on the state. key: [DK], update: [BV]"""
    return tl.fma(key[:, None], update[None, :], state * decay)


@triton.jit
def softplus(x):
    return tl.maximum(x, 0.0) + tl.log(1.0 + tl.exp(-tl.abs(x)))


@triton.jit
def log_decay(a, a_log, dt_bias):
    """At most 0."""
    return -tl.exp(a_log) * softplus(a.to(tl.float32) + dt_bias)


@triton.jit
def sigmoid(x):
    return 1.0 / (1.0 + tl.exp(-x.to(tl.float32)))


@triton.jit
def _load_logged(
    key_ptr, update_ptr, decay_ptr, place, stop,
    HV: tl.constexpr, HK: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr,
):  # fmt: skip
    """Logged key, update and decay. Pointers are at the slot's first entry, at its columns."""
    inside = place < stop
    key = load_early(key_ptr + place * (HK * DK), mask=inside, other=0.0)
    update = load_early(update_ptr + place * (HV * DV), mask=inside, other=0.0)
    decay = load_early(decay_ptr + place * HV, mask=inside, other=0.0)
    return key, update, decay


@triton.jit
def load_state(
    matrix_ptr, key_log_ptr, update_log_ptr, decay_log_ptr, matrix_stride, key_log_stride,
    update_log_stride, decay_log_stride, slot, head, column, pending, kept,
    HV: tl.constexpr, HK: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr,
):  # fmt: skip
    """The checkpoint of a slot with its pending tokens folded in, [DK, BV]; zeros unless `kept`.

    column: [BV], of the head. Written in earlier steps, so this may come before the wait.
    """
    row = tl.arange(0, DK)
    place = (head * DK + row)[:, None] * DV + column[None, :]
    state = load_early(matrix_ptr + slot * matrix_stride + place, mask=kept, other=0.0)
    key_ptr = key_log_ptr + slot * key_log_stride + head // (HV // HK) * DK + row
    update_ptr = update_log_ptr + slot * update_log_stride + head * DV + column
    decay_ptr = decay_log_ptr + slot * decay_log_stride + head
    key, update, decay = _load_logged(
        key_ptr, update_ptr, decay_ptr, 0, pending, HV, HK, DK, DV
    )  # fmt: skip
    for index in range(pending):
        next_key, next_update, next_decay = _load_logged(
            key_ptr, update_ptr, decay_ptr, index + 1, pending, HV, HK, DK, DV
        )  # fmt: skip
        state = move(state, decay, key, update)
        key, update, decay = next_key, next_update, next_decay
    return state


@triton.jit
def _load_token(
    qkv_ptr, b_ptr, a_ptr, token, inside, key_head, head, column, qkv_stride, b_stride, a_stride,
    HK: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr,
):  # fmt: skip
    """q, k, v, b and a of a token and a head; zeros unless `inside`."""
    row = tl.arange(0, DK)
    source = qkv_ptr + token * qkv_stride
    q = tl.load(source + key_head * DK + row, mask=inside, other=0.0)
    k = tl.load(source + (HK + key_head) * DK + row, mask=inside, other=0.0)
    v = tl.load(source + 2 * HK * DK + head * DV + column, mask=inside, other=0.0)
    b = tl.load(b_ptr + token * b_stride + head, mask=inside, other=0.0)
    a = tl.load(a_ptr + token * a_stride + head, mask=inside, other=0.0)
    return q, k, v, b, a


@triton.jit
def _compute_token(state, q, k, v, beta, decay, DK: tl.constexpr):
    """Return the state after a token, its output, normalised key and update."""
    q, k = q.to(tl.float32), k.to(tl.float32)
    k = k * tl.rsqrt(tl.sum(k * k, 0) + EPS)
    q = q * (tl.rsqrt(tl.sum(q * q, 0) + EPS) * (DK**-0.5))
    decayed = state * decay
    update = beta * (v.to(tl.float32) - tl.sum(decayed * k[:, None], 0))
    # S^T q of the new state, without waiting for it.
    out = tl.sum(decayed * q[:, None], 0) + update * tl.sum(k * q, 0)
    return move(state, decay, k, update), out, k, update


@triton.jit(do_not_specialize=["log_len"])
def step_kernel(
    qkv_ptr, b_ptr, a_ptr, a_log_ptr, dt_bias_ptr, starts_ptr, contexts_ptr, seq_lens_ptr,
    slots_ptr, pending_ptr, matrix_ptr, key_log_ptr, update_log_ptr, decay_log_ptr,
    raw_ptr, keys_ptr, decays_ptr, log_len, qkv_stride, b_stride, a_stride, matrix_stride,
    key_log_stride, update_log_stride, decay_log_stride,
    HV: tl.constexpr, HK: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr, BV: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Some columns of one head of one row. Long rows are left to the scan.

    It signals after it has waited, so that the next kernel may read what it reads here.
    """
    part = tl.program_id(0)
    row = part // (HV * (DV // BV))
    head = part // (DV // BV) % HV
    first = part % (DV // BV) * BV
    column = first + tl.arange(0, BV)
    begin, _, query_len, count, context, slot = read_tile(
        starts_ptr, contexts_ptr, seq_lens_ptr, slots_ptr, row, 0, True, 1
    )
    count = tl.where(query_len <= log_len, count, 0)
    kept = (count > 0) & (context > 0)
    pending = load_early(pending_ptr + slot, mask=kept, other=0).to(tl.int32)
    state = load_state(
        matrix_ptr, key_log_ptr, update_log_ptr, decay_log_ptr, matrix_stride, key_log_stride,
        update_log_stride, decay_log_stride, slot, head, column, pending, kept, HV, HK, DK, DV,
    )  # fmt: skip
    a_log = tl.load(a_log_ptr + head).to(tl.float32)
    dt_bias = tl.load(dt_bias_ptr + head).to(tl.float32)
    wait_for_inputs(PDL)
    let_next_start(PDL)
    tl.debug_barrier()  # before the log is written, all warps have read it

    dim = tl.arange(0, DK)
    key_head = head // (HV // HK)
    q, k, v, b, a = _load_token(
        qkv_ptr, b_ptr, a_ptr, begin, count > 0, key_head, head, column, qkv_stride, b_stride,
        a_stride, HK, DK, DV,
    )  # fmt: skip
    place = (head * DK + dim)[:, None] * DV + column[None, :]
    tl.store(matrix_ptr + slot * matrix_stride + place, state, mask=count > 0)
    update_ptr = update_log_ptr + slot * update_log_stride + head * DV + column
    for index in range(count):
        token = begin + index
        following = _load_token(
            qkv_ptr, b_ptr, a_ptr, token + 1, index + 1 < count, key_head, head, column,
            qkv_stride, b_stride, a_stride, HK, DK, DV,
        )  # fmt: skip
        decay = tl.exp(log_decay(a, a_log, dt_bias))
        state, out, k, update = _compute_token(state, q, k, v, sigmoid(b), decay, DK)
        tl.store(raw_ptr + (token * HV + head) * DV + column, out)
        tl.store(update_ptr + index * (HV * DV), update)
        if first == 0:
            tl.store(decays_ptr + token * HV + head, decay)
            if head % (HV // HK) == 0:
                tl.store(keys_ptr + (token * HK + key_head) * DK + dim, k)
        q, k, v, b, a = following


@triton.jit(do_not_specialize=["num_tokens", "num_reqs", "log_len"])
def finish_kernel(
    raw_ptr, keys_ptr, decays_ptr, z_ptr, norm_ptr, starts_ptr, contexts_ptr, seq_lens_ptr,
    slots_ptr, key_log_ptr, decay_log_ptr, out_ptr, eps, num_tokens, num_reqs, log_len, z_stride,
    key_log_stride, decay_log_stride,
    HV: tl.constexpr, HK: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr, HEADS: tl.constexpr,
    KEYS: tl.constexpr, SHORT: tl.constexpr, TILE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Norm and gate of HEADS heads of a tile of tokens; keys and decays of short rows to the log.

    KEYS: columns of logged keys that a program moves, rounded up. `step_kernel` precedes it and
    signals late: what was there before that one may be read before the wait.
    """
    let_next_start(PDL)
    if not SHORT:
        wait_for_inputs(PDL)
    begin, done, query_len, count, _, slot = read_tile(
        starts_ptr, contexts_ptr, seq_lens_ptr, slots_ptr, tl.program_id(0), num_reqs, SHORT, TILE
    )
    # A line is a head of a token.
    line = tl.arange(0, TILE * HEADS)[:, None]
    offset = done + line // HEADS
    head = tl.program_id(1) * HEADS + line % HEADS
    column = tl.arange(0, DV)[None, :]
    token = begin + offset
    live = (head < HV) & (offset < count)
    z = load_early(z_ptr + token * z_stride + head * DV + column, mask=live, other=0.0)
    weight = tl.load(norm_ptr + column).to(tl.float32)
    wait_for_inputs(PDL)

    x = tl.load(raw_ptr + (token * HV + head) * DV + column, mask=live, other=0.0)
    scale = tl.rsqrt(tl.sum(x * x, 1) / DV + eps)[:, None]
    z = z.to(tl.float32)
    out = x * scale * weight * (z * sigmoid(z))
    out = tl.where(live, out, 0.0).to(out_ptr.dtype.element_ty)
    target = out_ptr + (token * HV + head) * DV + column
    tl.store(target, out, mask=(head < HV) & (offset < query_len))
    if (count > 0) & (query_len <= log_len):
        logged_ptr = decay_log_ptr + slot * decay_log_stride + offset * HV + head
        decay = tl.load(decays_ptr + token * HV + head, mask=live, other=0.0)
        tl.store(logged_ptr, decay, mask=live)
        place = tl.arange(0, TILE)[:, None]
        share = tl.cdiv(HK * DK, tl.num_programs(1))
        element = tl.arange(0, KEYS)[None, :]
        mine = (place < count) & (element < share)
        element += tl.program_id(1) * share
        mine &= element < HK * DK
        key = tl.load(keys_ptr + (begin + place) * (HK * DK) + element, mask=mine, other=0.0)
        logged_ptr = key_log_ptr + slot * key_log_stride + place * (HK * DK) + element
        tl.store(logged_ptr, key, mask=mine)
    columns = tl.program_id(1) * (HEADS * DV) + tl.arange(0, HEADS * DV)[None, :]
    inside = columns < HV * DV
    zero_rest(out_ptr, columns, inside, starts_ptr, num_tokens, num_reqs, HV * DV, TILE)
