"""Norm of heads, rotation and the write into the KV cache, in one pass over q, k and v."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from stoop.ops.kernels.launch import overlapping, start_in_turn
from stoop.ops.library import register
from stoop.ops.rope import HeadNorms, Rotation


@triton.jit
def _rotate_and_store_kernel(
    qkv_ptr,
    table_ptr,
    positions_ptr,
    q_norm_ptr,
    k_norm_ptr,
    slot_mapping_ptr,
    cache_ptr,
    q_out_ptr,
    eps,
    value_offset,
    num_positions,
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HALF: tl.constexpr,
    NORMS: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """One head of one token a program: queries come first, then keys, then values."""
    start_in_turn(PDL)
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    column = tl.arange(0, BLOCK)
    live = column < HALF
    source = qkv_ptr + (token * (NUM_HEADS + 2 * NUM_KV_HEADS) + head) * (2 * HALF)
    first = tl.load(source + column, mask=live, other=0.0)
    second = tl.load(source + HALF + column, mask=live, other=0.0)
    if head < NUM_HEADS + NUM_KV_HEADS:
        x, y = first.to(tl.float32), second.to(tl.float32)
        if NORMS:
            weight_ptr = q_norm_ptr if head < NUM_HEADS else k_norm_ptr
            mean = tl.sum(x * x + y * y, axis=0) / (2 * HALF)
            scale = tl.rsqrt(mean + eps)
            upper = tl.load(weight_ptr + column, mask=live, other=0.0).to(tl.float32)
            lower = tl.load(weight_ptr + HALF + column, mask=live, other=0.0).to(tl.float32)
            # Rounded as the norm's output is where it is an operation of its own.
            x = (x * scale * upper).to(first.dtype).to(tl.float32)
            y = (y * scale * lower).to(first.dtype).to(tl.float32)
        position = tl.load(positions_ptr + token)
        angle = table_ptr + position * HALF + column
        cos = tl.load(angle, mask=live, other=0.0).to(tl.float32)
        sin = tl.load(angle + num_positions * HALF, mask=live, other=0.0).to(tl.float32)
        first = (x * cos - y * sin).to(first.dtype)
        second = (y * cos + x * sin).to(second.dtype)
    if head < NUM_HEADS:
        out = q_out_ptr + (token * NUM_HEADS + head) * (2 * HALF)
        tl.store(out + column, first, mask=live)
        tl.store(out + HALF + column, second, mask=live)
    else:
        slot = tl.load(slot_mapping_ptr + token)
        kv_head = head - NUM_HEADS
        offset = (slot * NUM_KV_HEADS + kv_head) * (2 * HALF)
        if kv_head >= NUM_KV_HEADS:
            offset = (slot * NUM_KV_HEADS + kv_head - NUM_KV_HEADS) * (2 * HALF) + value_offset
        stored = live & (slot >= 0)
        tl.store(cache_ptr + offset + column, first, mask=stored)
        tl.store(cache_ptr + offset + HALF + column, second, mask=stored)


@register(
    "rotate_and_store_(Tensor qkv, Tensor table, Tensor positions, Tensor? q_norm, "
    "Tensor? k_norm, float eps, Tensor slot_mapping, Tensor(a!) cache, Tensor(b!) q_out) -> ()"
)
def rotate_and_store_(
    qkv: Tensor,
    table: Tensor,
    positions: Tensor,
    q_norm: Tensor | None,
    k_norm: Tensor | None,
    eps: float,
    slot_mapping: Tensor,
    cache: Tensor,
    q_out: Tensor,
) -> None:
    tokens, num_heads, head_dim = q_out.shape
    num_kv_heads = cache.shape[3]
    half = head_dim // 2
    _rotate_and_store_kernel[(tokens, num_heads + 2 * num_kv_heads)](
        qkv, table, positions, q_norm, k_norm, slot_mapping, cache, q_out,
        eps, cache.stride(0), table.shape[1],
        NUM_HEADS=num_heads, NUM_KV_HEADS=num_kv_heads, HALF=half, NORMS=q_norm is not None,
        BLOCK=triton.next_power_of_2(half), num_warps=1, **overlapping(qkv),
    )  # fmt: skip


def rotate_and_store(
    qkv: Tensor,
    num_kv_heads: int,
    rotation: Rotation,
    norms: HeadNorms | None,
    cache: Tensor,
    slot_mapping: Tensor,
) -> Tensor:
    """qkv: [tokens, heads + 2 * num_kv_heads, head_dim], contiguous"""
    tokens, num_all, head_dim = qkv.shape
    assert qkv.is_contiguous() and cache.is_contiguous()
    q = torch.empty(
        tokens, num_all - 2 * num_kv_heads, head_dim, dtype=qkv.dtype, device=qkv.device
    )
    q_norm, k_norm, eps = norms or (None, None, 0.0)
    rotate_and_store_(
        qkv, rotation.table, rotation.positions, q_norm, k_norm, eps, slot_mapping, cache, q
    )
    return q
