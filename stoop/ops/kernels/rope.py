"""Norm of heads, rotation and the write into the KV cache, in one pass over q, k and v."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from stoop.ops.kernels.fp8 import to_fp8
from stoop.ops.kernels.launch import (
    let_next_start,
    load_early,
    overlapping,
    wait_for_inputs,
)
from stoop.ops.kv_store import FP8, NO_SCALES, KVScales
from stoop.ops.library import register
from stoop.ops.rope import HeadNorms, Rotation

PAIRS = 512  # pairs of elements per program


@triton.jit(do_not_specialize=["num_positions"])
def _rotate_and_store_kernel(
    qkv_ptr, table_ptr, positions_ptr, q_norm_ptr, k_norm_ptr, slot_mapping_ptr, cache_ptr,
    q_out_ptr, eps, k_scale, v_scale, value_offset, qkv_stride, num_positions,
    NUM_HEADS: tl.constexpr, NUM_KV_HEADS: tl.constexpr, HALF: tl.constexpr,
    ROTATED: tl.constexpr, NORMS: tl.constexpr, HEADS: tl.constexpr, BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """HEADS heads of one token per program: queries come first, then keys, then values.

    A head is HALF pairs: ROTATED ones (i, i + ROTATED) at its start, then pairs that stay as they
    are. k_scale, v_scale: of a cache in fp8, whose elements are bytes here; else None
    """
    let_next_start(PDL)
    token = tl.program_id(0).to(tl.int64)
    head = (tl.program_id(1) * HEADS + tl.arange(0, HEADS))[:, None]
    column = tl.arange(0, BLOCK)[None, :]
    live = (head < NUM_HEADS + 2 * NUM_KV_HEADS) & (column < HALF)
    is_query, is_value = head < NUM_HEADS, head >= NUM_HEADS + NUM_KV_HEADS
    # Positions and slots were written before this kernel could start: see launch.py.
    turned = column < ROTATED
    angle = table_ptr + load_early(positions_ptr + token) * ROTATED + column
    cos = tl.load(angle, mask=turned, other=1.0).to(tl.float32)
    sin = tl.load(angle + num_positions * ROTATED, mask=turned, other=0.0).to(tl.float32)
    slot = load_early(slot_mapping_ptr + token)
    # A pair's elements; where all are rotated, `column` and `column + HALF`.
    one = tl.where(turned, column, column + ROTATED)
    other = one + tl.where(turned, ROTATED, HALF - ROTATED)
    if NORMS:
        norm_ptr = tl.where(is_query, q_norm_ptr, k_norm_ptr)
        upper = tl.load(norm_ptr + one, mask=live, other=0.0).to(tl.float32)
        lower = tl.load(norm_ptr + other, mask=live, other=0.0).to(tl.float32)
    wait_for_inputs(PDL)

    source = qkv_ptr + token * qkv_stride + head * (2 * HALF)
    first = tl.load(source + one, mask=live, other=0.0)
    second = tl.load(source + other, mask=live, other=0.0)
    x, y = first.to(tl.float32), second.to(tl.float32)
    if NORMS:
        scale = tl.rsqrt(tl.sum(x * x + y * y, axis=1) / (2 * HALF) + eps)[:, None]
        # Rounded like the output of a separate norm.
        x = (x * scale * upper).to(first.dtype).to(tl.float32)
        y = (y * scale * lower).to(first.dtype).to(tl.float32)
    first = tl.where(is_value, first, (x * cos - y * sin).to(first.dtype))
    second = tl.where(is_value, second, (y * cos + x * sin).to(second.dtype))
    out = q_out_ptr + (token * NUM_HEADS + head) * (2 * HALF)
    tl.store(out + one, first, mask=live & is_query)
    tl.store(out + other, second, mask=live & is_query)
    kv_head = head - NUM_HEADS - tl.where(is_value, NUM_KV_HEADS, 0)
    place = (slot * NUM_KV_HEADS + kv_head) * (2 * HALF) + tl.where(is_value, value_offset, 0)
    stored = live & ~is_query & (slot >= 0)
    if k_scale is not None:
        divisor = tl.where(is_value, v_scale, k_scale)
        first, second = to_fp8(first, divisor), to_fp8(second, divisor)
    kept = cache_ptr.dtype.element_ty
    tl.store(cache_ptr + place + one, first.to(kept), mask=stored)
    tl.store(cache_ptr + place + other, second.to(kept), mask=stored)


@register(
    "rotate_and_store_(Tensor qkv, Tensor table, Tensor positions, Tensor? q_norm, "
    "Tensor? k_norm, float eps, Tensor slot_mapping, float k_scale, float v_scale, "
    "Tensor(a!) cache, Tensor(b!) q_out) -> ()"
)
def rotate_and_store_(
    qkv: Tensor,
    table: Tensor,
    positions: Tensor,
    q_norm: Tensor | None,
    k_norm: Tensor | None,
    eps: float,
    slot_mapping: Tensor,
    k_scale: float,
    v_scale: float,
    cache: Tensor,
    q_out: Tensor,
) -> None:
    tokens, num_heads, head_dim = q_out.shape
    num_kv_heads = cache.shape[3]
    half, num_all = head_dim // 2, num_heads + 2 * num_kv_heads
    block = triton.next_power_of_2(half)
    scales = (k_scale, v_scale) if cache.dtype == FP8 else (None, None)
    kept = cache.view(torch.uint8) if cache.dtype == FP8 else cache
    heads = min(max(1, PAIRS // block), triton.next_power_of_2(num_all))
    _rotate_and_store_kernel[(tokens, triton.cdiv(num_all, heads))](
        qkv, table, positions, q_norm, k_norm, slot_mapping, kept, q_out,
        eps, *scales, cache.stride(0), qkv.stride(0), table.shape[1],
        NUM_HEADS=num_heads, NUM_KV_HEADS=num_kv_heads, HALF=half, ROTATED=table.shape[2],
        NORMS=q_norm is not None, HEADS=heads, BLOCK=block, num_warps=4, **overlapping(qkv),
    )  # fmt: skip


def rotate_and_store(
    qkv: Tensor,
    num_kv_heads: int,
    rotation: Rotation,
    norms: HeadNorms | None,
    cache: Tensor,
    slot_mapping: Tensor,
    scales: KVScales = NO_SCALES,
) -> Tensor:
    """Rotate queries and keys, write keys and values to the cache, and return the queries.

    qkv: [tokens, heads + 2 * num_kv_heads, head_dim]; tokens may lie apart
    """
    tokens, num_all, head_dim = qkv.shape
    assert qkv.stride()[1:] == (head_dim, 1) and cache.is_contiguous()
    q = torch.empty(
        tokens, num_all - 2 * num_kv_heads, head_dim, dtype=qkv.dtype, device=qkv.device
    )
    q_norm, k_norm, eps = norms or (None, None, 0.0)
    rotate_and_store_(
        qkv,
        rotation.table,
        rotation.positions,
        q_norm,
        k_norm,
        eps,
        slot_mapping,
        *scales,
        cache,
        q,
    )
    return q
