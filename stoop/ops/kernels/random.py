"""Philox-4x32-10 inside kernels: the numbers of `stoop.ops.random`, computed where they are used.

Number j of a stream is word j % 4 of counter j // 4. So a block of numbers starts at a multiple of
four and costs one Philox for every four numbers.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from stoop.ops.library import register
from stoop.ops.random import Purpose

BLOCK = 1024


@triton.jit
def _to_uniform(bits):
    """In (0, 1), rounded like the reference: every step is exact or correctly rounded."""
    return tl.minimum((bits.to(tl.float32) + 0.5) * 2.3283064365386963e-10, 0.999999940395355)


@triton.jit
def philox_words(seed, position, group, PURPOSE: tl.constexpr):
    """Return four words for each counter in `group`. seed, position: int64; group: [m] int32"""
    zero = (group * 0).to(tl.uint32)
    place = zero + position.to(tl.uint32)  # the low 32 bits
    return tl.philox(seed, group.to(tl.uint32), place, zero + PURPOSE, zero)


@triton.jit
def first_uniform(seed, position, PURPOSE: tl.constexpr):
    """[1] float32: number 0 of each stream."""
    word, _, _, _ = philox_words(seed, position, tl.zeros([1], tl.int32), PURPOSE)
    return _to_uniform(word)


@triton.jit
def uniform_block(seed, position, start, PURPOSE: tl.constexpr, SIZE: tl.constexpr):
    """[SIZE] float32: the uniform numbers from index `start` on, a multiple of 4."""
    group = start // 4 + tl.arange(0, SIZE // 4)
    w0, w1, w2, w3 = philox_words(seed, position, group, PURPOSE)
    bits = tl.interleave(tl.interleave(w0, w2), tl.interleave(w1, w3))
    return _to_uniform(bits)


@triton.jit
def gumbel_block(seed, position, start, PURPOSE: tl.constexpr, SIZE: tl.constexpr):
    """[SIZE] float32: the Gumbel noise from index `start` on, a multiple of 4."""
    return _to_gumbel(uniform_block(seed, position, start, PURPOSE, SIZE))


@triton.jit
def gumbel_at(seed, position, number, PURPOSE: tl.constexpr):
    """[m] float32: the values at indices `number` ([m] int32), at four times the work for each."""
    w0, w1, w2, w3 = philox_words(seed, position, number // 4, PURPOSE)
    word = number % 4
    bits = tl.where(word < 2, tl.where(word == 0, w0, w1), tl.where(word == 2, w2, w3))
    return _to_gumbel(_to_uniform(bits))


@triton.jit
def _to_gumbel(u):
    """-log(-log1p(-u)).

    log1p(-u) is log(w) * u / (1 - w) with w = 1 - u as it is rounded; 1 - w is exact.
    """
    w = 1.0 - u
    return -tl.log(tl.where(w == 1.0, u, -tl.log(w) * (u / (1.0 - w))))


@triton.jit
def _noise_kernel(
    seeds_ptr,
    positions_ptr,
    out_ptr,
    count,
    PURPOSE: tl.constexpr,
    GUMBEL: tl.constexpr,
    SIZE: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    start = tl.program_id(1) * SIZE
    seed, position = tl.load(seeds_ptr + row), tl.load(positions_ptr + row)
    if GUMBEL:
        noise = gumbel_block(seed, position, start, PURPOSE, SIZE)
    else:
        noise = uniform_block(seed, position, start, PURPOSE, SIZE)
    column = start + tl.arange(0, SIZE)
    tl.store(out_ptr + row * count + column, noise, mask=column < count)


@register("noise_(Tensor seeds, Tensor positions, int purpose, bool gumbel, Tensor(a!) out) -> ()")
def noise_(seeds: Tensor, positions: Tensor, purpose: int, gumbel: bool, out: Tensor) -> None:
    """seeds, positions: [n] int64, out: [n, count] float32, contiguous"""
    n, count = out.shape
    _noise_kernel[(n, triton.cdiv(count, BLOCK))](
        seeds, positions, out, count, PURPOSE=purpose, GUMBEL=gumbel, SIZE=BLOCK, num_warps=4
    )


def uniform(seeds: Tensor, positions: Tensor, purpose: Purpose, count: int) -> Tensor:
    """[n, count] float32 in (0, 1), with the reference's bits."""
    out = torch.empty(seeds.shape[0], count, dtype=torch.float32, device=seeds.device)
    noise_(seeds.contiguous(), positions.contiguous(), int(purpose), False, out)
    return out
