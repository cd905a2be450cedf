"""The ratio test and the residual draw, from logits: probabilities are never written to memory.

Four kernels: softmax maximum and sum of each part of the vocabulary, for target and draft; the
test, from the reduced parts; the best token of each part of the residual; the best of all parts.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from stoop.ops.kernels.random import first_uniform, gumbel_block
from stoop.ops.kernels.sampling import (
    NEVER_KEY,
    PART,
    load_part,
    num_parts,
    pack,
    row_parameter,
    softmax_part,
    softmax_whole,
    unpack_place,
    width,
)
from stoop.ops.library import register
from stoop.ops.random import Purpose

ACCEPT = tl.constexpr(int(Purpose.ACCEPT))
RESAMPLE = tl.constexpr(int(Purpose.RESAMPLE))


@triton.jit
def _rows(logits_ptr, draft_ptr, slot_ptr, stride, row_stride, draft_stride, draft_row_stride, K):
    """Pointers to target and draft logits of this program: draft j of row i."""
    place = tl.program_id(0).to(tl.int64)
    row, number = place // K, place % K
    own = row_parameter(row, slot_ptr)
    return (
        logits_ptr + row * row_stride + number * stride,
        draft_ptr + own * draft_row_stride + number * draft_stride,
    )


@triton.jit
def _softmax_parts_kernel(
    logits_ptr,
    draft_ptr,
    slot_ptr,
    bests_ptr,
    totals_ptr,
    stride,
    row_stride,
    draft_stride,
    draft_row_stride,
    K,
    size,
    num_parts,
    PART: tl.constexpr,
):
    target, draft = _rows(
        logits_ptr, draft_ptr, slot_ptr, stride, row_stride, draft_stride, draft_row_stride, K
    )
    place, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    out = 2 * place * num_parts + part
    _, x = load_part(target, part * PART, size, PART, float("-inf"))
    best, total = softmax_part(x)
    tl.store(bests_ptr + out, best)
    tl.store(totals_ptr + out, total)
    _, x = load_part(draft, part * PART, size, PART, float("-inf"))
    best, total = softmax_part(x)
    tl.store(bests_ptr + out + num_parts, best)
    tl.store(totals_ptr + out + num_parts, total)


@triton.jit
def _ratio_kernel(
    logits_ptr,
    draft_ptr,
    slot_ptr,
    drafts_ptr,
    seeds_ptr,
    positions_ptr,
    bests_ptr,
    totals_ptr,
    scale_ptr,
    accepts_ptr,
    stride,
    row_stride,
    draft_stride,
    draft_row_stride,
    K,
    num_parts,
    WIDTH: tl.constexpr,
):
    target, draft = _rows(
        logits_ptr, draft_ptr, slot_ptr, stride, row_stride, draft_stride, draft_row_stride, K
    )
    place = tl.program_id(0).to(tl.int64)
    row = place // K
    at = 2 * place * num_parts
    best_p, total_p = softmax_whole(bests_ptr + at, totals_ptr + at, num_parts, WIDTH)
    at += num_parts
    best_q, total_q = softmax_whole(bests_ptr + at, totals_ptr + at, num_parts, WIDTH)
    tl.store(scale_ptr + 4 * place, best_p)
    tl.store(scale_ptr + 4 * place + 1, total_p)
    tl.store(scale_ptr + 4 * place + 2, best_q)
    tl.store(scale_ptr + 4 * place + 3, total_q)
    token = tl.load(drafts_ptr + place)
    p = tl.exp(tl.load(target + token).to(tl.float32) - best_p) / total_p
    q = tl.exp(tl.load(draft + token).to(tl.float32) - best_q) / total_q
    seed = tl.load(seeds_ptr + row_parameter(row, slot_ptr))
    u = first_uniform(seed, tl.load(positions_ptr + row) + place % K, ACCEPT)
    tl.store(accepts_ptr + place + tl.arange(0, 1), u * q < p)


@triton.jit
def _residual_kernel(
    logits_ptr,
    draft_ptr,
    slot_ptr,
    seeds_ptr,
    positions_ptr,
    scale_ptr,
    accepts_ptr,
    packed_ptr,
    stride,
    row_stride,
    draft_stride,
    draft_row_stride,
    K,
    size,
    num_parts,
    PART: tl.constexpr,
):
    """Find the best token of a part twice: of the residual, and of the target in case all parts of
    the residual are empty."""
    target, draft = _rows(
        logits_ptr, draft_ptr, slot_ptr, stride, row_stride, draft_stride, draft_row_stride, K
    )
    place, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    if tl.load(accepts_ptr + place):
        return
    row = place // K
    column, x = load_part(target, part * PART, size, PART, float("-inf"))
    _, y = load_part(draft, part * PART, size, PART, float("-inf"))
    scale_ptr += 4 * place
    p = tl.exp(x - tl.load(scale_ptr)) / tl.load(scale_ptr + 1)
    q = tl.exp(y - tl.load(scale_ptr + 2)) / tl.load(scale_ptr + 3)
    seed = tl.load(seeds_ptr + row_parameter(row, slot_ptr))
    position = tl.load(positions_ptr + row) + place % K
    noise = gumbel_block(seed, position, part * PART, RESAMPLE, PART)
    rest = p - q
    score = tl.where(rest > 0, tl.log(rest), tl.where(rest == rest, float("-inf"), rest)) + noise
    out = 2 * place * num_parts + part
    outside = -0x8000000000000000
    packed = tl.where(column < size, pack(score, column), outside)
    tl.store(packed_ptr + out, tl.max(packed, axis=0))
    packed = tl.where(column < size, pack(tl.log(p) + noise, column), outside)
    tl.store(packed_ptr + out + num_parts, tl.max(packed, axis=0))


@triton.jit
def _redraw_kernel(packed_ptr, accepts_ptr, out_ptr, num_parts, WIDTH: tl.constexpr):
    place = tl.program_id(0).to(tl.int64)
    part = tl.arange(0, WIDTH)
    live = (part < num_parts) & (tl.load(accepts_ptr + place) == 0)
    packed_ptr += 2 * place * num_parts + part
    outside = -0x8000000000000000
    residual = tl.max(tl.load(packed_ptr, mask=live, other=outside), axis=0)
    target = tl.max(tl.load(packed_ptr + num_parts, mask=live, other=outside), axis=0)
    best = tl.where((residual >> 32) > NEVER_KEY, residual, target)
    tl.store(out_ptr + place, tl.where(best == outside, 0, unpack_place(best)))


@register(
    "judge_drafts_(Tensor logits, Tensor draft_logits, Tensor drafts, Tensor seeds, "
    "Tensor positions, Tensor? slot, Tensor(a!) bests, Tensor(b!) totals, Tensor(c!) scale, "
    "Tensor(d!) packed, Tensor(e!) accepts, Tensor(f!) redrawn) -> ()"
)
def _judge_drafts_(
    logits: Tensor,
    draft_logits: Tensor,
    drafts: Tensor,
    seeds: Tensor,
    positions: Tensor,
    slot: Tensor | None,
    bests: Tensor,
    totals: Tensor,
    scale: Tensor,
    packed: Tensor,
    accepts: Tensor,
    redrawn: Tensor,
) -> None:
    """bests, totals: [n * K, 2, num_parts] float32, packed: the same in int64, scale: [n * K, 4]
    float32; all are scratch"""
    count, _, parts = bests.shape
    K, size = drafts.shape[1], logits.shape[2]
    strides = (*logits.stride()[1::-1], *draft_logits.stride()[1::-1], K)
    given = (logits, draft_logits, slot)
    _softmax_parts_kernel[(count, parts)](
        *given, bests, totals, *strides, size, parts, PART=PART, num_warps=8
    )
    _ratio_kernel[(count,)](
        *given, drafts, seeds, positions, bests, totals, scale, accepts, *strides, parts,
        WIDTH=width(parts), num_warps=1,
    )  # fmt: skip
    _residual_kernel[(count, parts)](
        *given, seeds, positions, scale, accepts, packed, *strides, size, parts,
        PART=PART, num_warps=8,
    )  # fmt: skip
    _redraw_kernel[(count,)](packed, accepts, redrawn, parts, WIDTH=width(parts), num_warps=1)


def judge_drafts(
    logits: Tensor,
    draft_logits: Tensor,
    drafts: Tensor,
    seeds: Tensor,
    positions: Tensor,
    slot: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Return which drafts pass the ratio test, [n, K] bool, and what replaces those that do not,
    [n, K] int64; 0 for the others.

    logits: [n, K or more, vocab_size], adjusted; draft_logits: [n, K, vocab_size]
    drafts: [n, K] int64; seeds: [n]; positions: [n] of the first draft
    slot: [n]; with it, draft_logits and seeds are tables by slot
    """
    assert logits.stride(2) == 1 and draft_logits.stride(2) == 1
    n, K = drafts.shape
    shape = (n * K, 2, num_parts(logits.shape[2]))
    bests, totals, scale = (
        torch.empty(size, dtype=torch.float32, device=logits.device)
        for size in (shape, shape, (n * K, 4))
    )
    packed = bests.new_empty(shape, dtype=torch.int64)
    accepts = bests.new_empty((n, K), dtype=torch.bool)
    redrawn = bests.new_empty((n, K), dtype=torch.int64)
    _judge_drafts_(
        logits, draft_logits, drafts.contiguous(), seeds, positions, slot,
        bests, totals, scale, packed, accepts, redrawn,
    )  # fmt: skip
    return accepts, redrawn
