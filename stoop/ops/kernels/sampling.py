"""Argmax, the draw and scores. The vocabulary is split over programs; a second kernel reduces.

A candidate is packed into one int64: an order-preserving key of the score in the high bits, the
reversed column in the low bits. The larger of two is the better one, and of equal scores the first
column wins. Parts have the same size in every batch, so a row's result never depends on other rows.

With `slot` ([n] int64), parameters are tables by slot.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from stoop.ops.kernels.launch import overlapping, start_in_turn
from stoop.ops.kernels.random import gumbel_at, gumbel_block
from stoop.ops.library import register
from stoop.ops.random import Purpose

PART = 4096  # tokens per program
NAN_KEY = tl.constexpr(0x7FFFFFFF)
NEVER_KEY = tl.constexpr(-0x7F800001)  # the key of -inf


@triton.jit
def float_key(x):
    """int32 keys in the order of float32, NaN above all; equal floats have equal keys."""
    bits = tl.where(x == 0.0, 0.0, x).to(tl.int32, bitcast=True)
    return tl.where(x != x, NAN_KEY, bits ^ ((bits >> 31) & 0x7FFFFFFF))


@triton.jit
def pack(score, place):
    """Pack a candidate: int64, larger for better scores, then for earlier places."""
    return (float_key(score).to(tl.int64) << 32) | (0x7FFFFFFF - place).to(tl.int64)


@triton.jit
def unpack_place(packed):
    """The place of a packed candidate."""
    return 0x7FFFFFFF - (packed & 0x7FFFFFFF)


@triton.jit
def row_parameter(row, slot_ptr):
    """Index of a row's parameters: its slot, or the row itself."""
    return tl.load(slot_ptr + row) if slot_ptr is not None else row


@triton.jit
def load_part(ptr, start, size, PART: tl.constexpr, other):
    """Return columns and their values in float32."""
    column = start + tl.arange(0, PART)
    return column, tl.load(ptr + column, mask=column < size, other=other).to(tl.float32)


@triton.jit
def _candidates_kernel(
    logits_ptr,
    slot_ptr,
    temperature_ptr,
    seeds_ptr,
    positions_ptr,
    ahead_ptr,  # added to the positions, both by slot; or None, and positions are by row
    d2t_ptr,  # added to a column to get the index of its noise; or None
    packed_ptr,
    stride,
    size,
    num_parts,
    PURPOSE: tl.constexpr,  # -1: no noise for any row
    TEMPERS: tl.constexpr,
    PART: tl.constexpr,
    PDL: tl.constexpr,
):
    start_in_turn(PDL)
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    column, x = load_part(logits_ptr + row * stride, part * PART, size, PART, 0.0)
    if PURPOSE >= 0:
        own = row_parameter(row, slot_ptr)
        temperature = tl.load(temperature_ptr + own)
        if temperature > 0:
            if TEMPERS:
                x = tl.div_rn(x, temperature + tl.zeros_like(x))
            seed = tl.load(seeds_ptr + own)
            if ahead_ptr is not None:
                position = tl.load(positions_ptr + own) + tl.load(ahead_ptr + own)
            else:
                position = tl.load(positions_ptr + row)
            if d2t_ptr is not None:
                offset = tl.load(d2t_ptr + column, mask=column < size, other=0)
                x += gumbel_at(seed, position, column + offset.to(tl.int32), PURPOSE)
            else:
                x += gumbel_block(seed, position, part * PART, PURPOSE, PART)
    packed = tl.where(column < size, pack(x, column), -0x8000000000000000)
    tl.store(packed_ptr + row * num_parts + part, tl.max(packed, axis=0))


@triton.jit
def _best_kernel(
    packed_ptr,
    out_ptr,
    num_parts,
    CHECKS: tl.constexpr,  # -1 for a row with NaN, or of -inf alone
    WIDTH: tl.constexpr,
    PDL: tl.constexpr,
):
    start_in_turn(PDL)
    row = tl.program_id(0).to(tl.int64)
    part = tl.arange(0, WIDTH)
    packed = tl.load(
        packed_ptr + row * num_parts + part, mask=part < num_parts, other=-0x8000000000000000
    )
    best = tl.max(packed, axis=0)
    place = unpack_place(best)
    if CHECKS:
        key = best >> 32
        place = tl.where((key == NAN_KEY) | (key <= NEVER_KEY), -1, place)
    tl.store(out_ptr + row, place)


def num_parts(vocab_size: int) -> int:
    """Programs that share a row."""
    return triton.cdiv(vocab_size, PART)


def width(parts: int) -> int:
    """Size of the block that holds a value of each part."""
    return triton.next_power_of_2(parts)


@register("argmax_(Tensor logits, bool checks, Tensor(a!) packed, Tensor(b!) out) -> ()")
def argmax_(logits: Tensor, checks: bool, packed: Tensor, out: Tensor) -> None:
    """logits: [n, vocab_size]; packed: [n, num_parts] int64, scratch; out: [n] int64"""
    reduce(logits, (None,) * 6, packed, out, -1, False, checks)


@register(
    "draw_(Tensor logits, Tensor temperature, Tensor seeds, Tensor positions, Tensor? slot, "
    "int purpose, bool tempers, bool checks, Tensor(a!) packed, Tensor(b!) out) -> ()"
)
def draw_(
    logits: Tensor,
    temperature: Tensor,
    seeds: Tensor,
    positions: Tensor,
    slot: Tensor | None,
    purpose: int,
    tempers: bool,
    checks: bool,
    packed: Tensor,
    out: Tensor,
) -> None:
    noise = (slot, temperature, seeds, positions, None, None)
    reduce(logits, noise, packed, out, purpose, tempers, checks)


def reduce(
    logits: Tensor,
    noise: tuple[Tensor | None, ...],
    packed: Tensor,
    out: Tensor,
    purpose: int,
    tempers: bool,
    checks: bool = False,
) -> None:
    """Launch both kernels. noise: the kernel's arguments from `slot` to `d2t`"""
    n, parts = packed.shape
    _candidates_kernel[(n, parts)](
        logits, *noise, packed, logits.stride(0), logits.shape[1], parts,
        PURPOSE=purpose, TEMPERS=tempers, PART=PART, num_warps=8, **overlapping(logits),
    )  # fmt: skip
    _best_kernel[(n,)](
        packed, out, parts, CHECKS=checks, WIDTH=width(parts), num_warps=1, **overlapping(out)
    )


def greedy(logits: Tensor, checks: bool = False) -> Tensor:
    """[n] int64: the argmax as torch has it, the first of equal ones; the first NaN if any.

    checks: -1 for a row with NaN, or of -inf alone
    """
    packed, out = draw_buffers(logits)
    argmax_(logits, checks, packed, out)
    return out


def draw(
    logits: Tensor,
    temperature: Tensor,
    seeds: Tensor,
    positions: Tensor,
    purpose: Purpose = Purpose.SAMPLE,
    slot: Tensor | None = None,
    tempers: bool = False,
    checks: bool = False,
) -> Tensor:
    """[n] int64: a draw from softmax(logits); the argmax at temperature 0.

    positions: [n], always by row
    tempers: divide by the temperature here; otherwise the logits are tempered already
    checks: -1 for a row without a best token, as in `greedy`
    """
    packed, out = draw_buffers(logits)
    draw_(logits, temperature, seeds, positions, slot, int(purpose), tempers, checks, packed, out)
    return out


def draw_buffers(logits: Tensor) -> tuple[Tensor, Tensor]:
    """Allocate the candidates of all parts and the tokens."""
    assert logits.stride(1) == 1
    n, vocab_size = logits.shape
    packed = torch.empty(n, num_parts(vocab_size), dtype=torch.int64, device=logits.device)
    return packed, torch.empty(n, dtype=torch.int64, device=logits.device)


@triton.jit
def softmax_part(x):
    """Maximum of a part and the sum of exp(x - maximum); (-inf, 0) if all are -inf."""
    best = tl.max(x, axis=0)
    return best, tl.sum(tl.exp(x - tl.where(best == float("-inf"), 0.0, best)), axis=0)


@triton.jit
def softmax_whole(best_ptr, total_ptr, num_parts, WIDTH: tl.constexpr):
    """Maximum and sum of a whole row, from those of its parts."""
    part = tl.arange(0, WIDTH)
    live = part < num_parts
    bests = tl.load(best_ptr + part, mask=live, other=float("-inf"))
    totals = tl.load(total_ptr + part, mask=live, other=0.0)
    best = tl.max(bests, axis=0)
    return best, tl.sum(totals * tl.exp(bests - tl.where(best == float("-inf"), 0.0, best)), axis=0)


@triton.jit
def _score_parts_kernel(
    logits_ptr,
    chosen_ptr,
    best_ptr,
    total_ptr,
    above_ptr,
    stride,
    size,
    num_parts,
    PART: tl.constexpr,
):
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    logits_ptr += row * stride
    own = tl.load(logits_ptr + tl.load(chosen_ptr + row)).to(tl.float32)
    _, x = load_part(logits_ptr, part * PART, size, PART, float("-inf"))
    best, total = softmax_part(x)
    place = row * num_parts + part
    tl.store(best_ptr + place, best)
    tl.store(total_ptr + place, total)
    tl.store(above_ptr + place, tl.sum((x > own).to(tl.int32), axis=0))


@triton.jit
def _score_kernel(
    logits_ptr,
    chosen_ptr,
    best_ptr,
    total_ptr,
    above_ptr,
    scale_ptr,
    own_ptr,
    rank_ptr,
    stride,
    num_parts,
    WIDTH: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    place = row * num_parts
    best, total = softmax_whole(best_ptr + place, total_ptr + place, num_parts, WIDTH)
    scale = tl.log(total)
    own = tl.load(logits_ptr + row * stride + tl.load(chosen_ptr + row)).to(tl.float32)
    tl.store(scale_ptr + 2 * row, best)
    tl.store(scale_ptr + 2 * row + 1, scale)
    tl.store(own_ptr + row, own - best - scale)
    part = tl.arange(0, WIDTH)
    above = tl.load(above_ptr + place + part, mask=part < num_parts, other=0)
    tl.store(rank_ptr + row, tl.sum(above, axis=0).to(tl.int64) + 1)


@register(
    "score_(Tensor logits, Tensor chosen, Tensor(a!) bests, Tensor(b!) totals, Tensor(c!) aboves, "
    "Tensor(d!) scale, Tensor(e!) own, Tensor(f!) rank) -> ()"
)
def score_(
    logits: Tensor,
    chosen: Tensor,
    bests: Tensor,
    totals: Tensor,
    aboves: Tensor,
    scale: Tensor,
    own: Tensor,
    rank: Tensor,
) -> None:
    """bests, totals, aboves: [n, num_parts], scratch

    scale: [n, 2] float32: what to subtract from a logit, in this order, for its log-probability
    own: [n] float32, rank: [n] int64
    """
    n, parts = bests.shape
    stride = logits.stride(0)
    _score_parts_kernel[(n, parts)](
        logits, chosen, bests, totals, aboves, stride, logits.shape[1], parts,
        PART=PART, num_warps=8,
    )  # fmt: skip
    _score_kernel[(n,)](
        logits, chosen, bests, totals, aboves, scale, own, rank, stride, parts,
        WIDTH=width(parts), num_warps=1,
    )  # fmt: skip


def score(logits: Tensor, chosen: Tensor, num_best: int) -> tuple[Tensor, Tensor, Tensor]:
    """Compute log-probabilities of the chosen token and of the best ones.

    Returns ids [n, 1 + num_best], log-probabilities of the same shape, and ranks [n] of `chosen`.
    """
    assert logits.stride(1) == 1
    n, vocab_size = logits.shape
    shape = (n, num_parts(vocab_size))
    own = torch.empty(n, dtype=torch.float32, device=logits.device)
    bests, totals = (own.new_empty(shape) for _ in range(2))
    aboves, rank = own.new_empty(shape, dtype=torch.int32), own.new_empty(n, dtype=torch.int64)
    scale = own.new_empty(n, 2)
    score_(logits, chosen.contiguous(), bests, totals, aboves, scale, own, rank)
    best, best_ids = logits.topk(min(num_best, vocab_size), dim=1)
    logprobs = best.float() - scale[:, :1] - scale[:, 1:]
    return torch.cat((chosen[:, None], best_ids), 1), torch.cat((own[:, None], logprobs), 1), rank
