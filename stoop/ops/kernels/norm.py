"""RMSNorm and the gated activation."""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from stoop.ops.kernels.launch import (
    let_next_start,
    overlapping,
    start_in_turn,
    wait_for_inputs,
)
from stoop.ops.library import register

MAX_WARPS = 16


@triton.jit
def _rms_norm_kernel(
    x_ptr,
    weight_ptr,
    out_ptr,
    size,
    x_stride,
    out_stride,
    eps,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """One row per program."""
    start_in_turn(PDL)
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    live = column < size
    wide = tl.load(x_ptr + row * x_stride + column, mask=live, other=0.0).to(tl.float32)
    scale = tl.rsqrt(tl.sum(wide * wide, axis=0) / size + eps)
    weight = tl.load(weight_ptr + column, mask=live, other=0.0).to(tl.float32)
    tl.store(out_ptr + row * out_stride + column, wide * scale * weight, mask=live)


@register("rms_norm_(Tensor x, Tensor weight, float eps, Tensor(a!) out) -> ()")
def rms_norm_(x: Tensor, weight: Tensor, eps: float, out: Tensor) -> None:
    """x and out: [..., n], each with one stride between its rows"""
    rows = x.flatten(0, -2) if x.dim() > 2 else x.view(-1, x.shape[-1])
    size = rows.shape[1]
    out_stride = out.stride(-2) if out.dim() > 1 else size
    _rms_norm_kernel[(rows.shape[0],)](
        rows, weight, out, size, rows.stride(0), out_stride, eps,
        BLOCK=triton.next_power_of_2(size), num_warps=_num_warps(size), **overlapping(out),
    )  # fmt: skip


def _num_warps(size: int) -> int:
    return min(MAX_WARPS, max(1, triton.next_power_of_2(size) // 512))


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Normalise the last axis. x: [..., n], with one stride between its rows"""
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    rms_norm_(x, weight, eps, out)
    return out


def rms_norm_into(x: Tensor, weight: Tensor, eps: float, out: Tensor) -> None:
    """Write `rms_norm(x)` into `out`."""
    rms_norm_(x, weight, eps, out)


def join_norms(parts: Sequence[Tensor], weights: Sequence[Tensor], eps: float) -> Tensor:
    """Normalise each part into its columns of the result."""
    width = sum(part.shape[1] for part in parts)
    out = torch.empty(parts[0].shape[0], width, dtype=parts[0].dtype, device=parts[0].device)
    start = 0
    for part, weight in zip(parts, weights, strict=True):
        rms_norm_(part, weight, eps, out[:, start : start + part.shape[1]])
        start += part.shape[1]
    return out


@triton.jit
def _join_embedded_kernel(
    token_ids_ptr,
    table_ptr,
    table_norm_ptr,
    features_ptr,
    feature_norm_ptr,
    out_ptr,
    size,
    features_stride,
    eps,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """One half of a row per program. Waits before it signals: later kernels rely on that."""
    wait_for_inputs(PDL)
    let_next_start(PDL)
    row, half = tl.program_id(0).to(tl.int64), tl.program_id(1)
    column = tl.arange(0, BLOCK)
    live = column < size
    token_id = tl.load(token_ids_ptr + row).to(tl.int64)
    embedded = half == 0
    source = tl.where(embedded, table_ptr + token_id * size, features_ptr + row * features_stride)
    norm = tl.where(embedded, table_norm_ptr, feature_norm_ptr)
    wide = tl.load(source + column, mask=live, other=0.0).to(tl.float32)
    scale = tl.rsqrt(tl.sum(wide * wide, axis=0) / size + eps)
    weight = tl.load(norm + column, mask=live, other=0.0).to(tl.float32)
    tl.store(out_ptr + (2 * row + half) * size + column, wide * scale * weight, mask=live)


@register(
    "join_embedded_(Tensor token_ids, Tensor table, Tensor table_norm, Tensor features, "
    "Tensor feature_norm, float eps, Tensor(a!) out) -> ()"
)
def join_embedded_(
    token_ids: Tensor,
    table: Tensor,
    table_norm: Tensor,
    features: Tensor,
    feature_norm: Tensor,
    eps: float,
    out: Tensor,
) -> None:
    """features: [tokens, n] with one stride between its rows; out: [tokens, 2n]"""
    tokens, size = features.shape
    assert table.shape[1] == size and table.is_contiguous() and out.is_contiguous()
    _join_embedded_kernel[(tokens, 2)](
        token_ids, table, table_norm, features, feature_norm, out, size, features.stride(0), eps,
        BLOCK=triton.next_power_of_2(size), num_warps=_num_warps(size), **overlapping(out),
    )  # fmt: skip


def join_embedded(
    token_ids: Tensor,
    table: Tensor,
    table_norm: Tensor,
    features: Tensor,
    feature_norm: Tensor,
    eps: float,
) -> Tensor:
    """Concatenate normalised embeddings and features, in one launch."""
    out = features.new_empty(features.shape[0], 2 * features.shape[1])
    join_embedded_(token_ids, table, table_norm, features, feature_norm, eps, out)
    return out


@triton.jit(do_not_specialize=["count"])
def _take_and_norm_kernel(
    x_ptr, index_ptr, weight_ptr, out_ptr, normed_ptr, count, size, eps,
    INDEXED: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One row per program; rows past `count` are zeroed."""
    start_in_turn(PDL)
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    live = column < size
    source = row
    if INDEXED:
        source = tl.load(index_ptr + row, mask=row < count, other=0)
    x = tl.load(x_ptr + source * size + column, mask=live & (row < count), other=0.0)
    tl.store(out_ptr + row * size + column, x, mask=live)
    if row < count:
        wide = x.to(tl.float32)
        scale = tl.rsqrt(tl.sum(wide * wide, axis=0) / size + eps)
        weight = tl.load(weight_ptr + column, mask=live, other=0.0).to(tl.float32)
        tl.store(normed_ptr + row * size + column, wide * scale * weight, mask=live)


@register(
    "take_and_norm_(Tensor x, Tensor? index, Tensor weight, float eps, Tensor(a!) out, "
    "Tensor(b!) normed) -> ()"
)
def take_and_norm_(
    x: Tensor, index: Tensor | None, weight: Tensor, eps: float, out: Tensor, normed: Tensor
) -> None:
    """x: [tokens, n], out: [rows, n], normed: [m, n], contiguous; index: [m] int64 or all"""
    (rows, size), count = out.shape, normed.shape[0]
    assert x.is_contiguous() and out.is_contiguous() and count <= rows
    _take_and_norm_kernel[(rows,)](
        x, x if index is None else index, weight, out, normed, count, size, eps,
        INDEXED=index is not None, BLOCK=triton.next_power_of_2(size), num_warps=_num_warps(size),
        **overlapping(x),
    )  # fmt: skip


def take_and_norm(
    x: Tensor, index: Tensor | None, out: Tensor, weight: Tensor, eps: float
) -> Tensor:
    """Copy rows into `out`, zero the rest of it, and return the copied rows normalised."""
    normed = x.new_empty(x.shape[0] if index is None else index.shape[0], x.shape[1])
    take_and_norm_(x, index, weight, eps, out, normed)
    return normed


@triton.jit
def _silu_and_mul_kernel(x_ptr, out_ptr, size, BLOCK: tl.constexpr, PDL: tl.constexpr):
    start_in_turn(PDL)
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    live = column < size
    gate = tl.load(x_ptr + row * 2 * size + column, mask=live, other=0.0)
    up = tl.load(x_ptr + row * 2 * size + size + column, mask=live, other=0.0)
    wide = gate.to(tl.float32)
    # Rounded between the two steps, as the reference is.
    silu = (wide / (1.0 + tl.exp(-wide))).to(gate.dtype).to(tl.float32)
    tl.store(out_ptr + row * size + column, silu * up.to(tl.float32), mask=live)


@register("silu_and_mul_(Tensor gate_up, Tensor(a!) out) -> ()")
def silu_and_mul_(gate_up: Tensor, out: Tensor) -> None:
    """gate_up: [tokens, 2n], out: [tokens, n], contiguous"""
    tokens, size = out.shape
    block = min(1024, triton.next_power_of_2(size))
    _silu_and_mul_kernel[(tokens, triton.cdiv(size, block))](
        gate_up, out, size, BLOCK=block, num_warps=4, **overlapping(out)
    )


def silu_and_mul(gate_up: Tensor) -> Tensor:
    """Compute silu(gate) * up. gate_up: [tokens, 2n], contiguous"""
    out = gate_up.new_empty(gate_up.shape[0], gate_up.shape[1] // 2)
    silu_and_mul_(gate_up, out)
    return out


@triton.jit
def _mul_sigmoid_kernel(
    x_ptr, gate_ptr, out_ptr, size, gate_stride, BLOCK: tl.constexpr, PDL: tl.constexpr
):
    start_in_turn(PDL)
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    live = column < size
    x = tl.load(x_ptr + row * size + column, mask=live, other=0.0)
    gate = tl.load(gate_ptr + row * gate_stride + column, mask=live, other=0.0).to(tl.float32)
    # Rounded between the two steps, as the reference is.
    factor = (1.0 / (1.0 + tl.exp(-gate))).to(x.dtype).to(tl.float32)
    tl.store(out_ptr + row * size + column, x.to(tl.float32) * factor, mask=live)


@register("mul_sigmoid_(Tensor x, Tensor gate, Tensor(a!) out) -> ()")
def mul_sigmoid_(x: Tensor, gate: Tensor, out: Tensor) -> None:
    """x, out: [tokens, n], contiguous; gate: [tokens, n], with one stride between its rows"""
    tokens, size = x.shape
    block = min(1024, triton.next_power_of_2(size))
    _mul_sigmoid_kernel[(tokens, triton.cdiv(size, block))](
        x, gate, out, size, gate.stride(0), BLOCK=block, num_warps=4, **overlapping(out)
    )


def mul_sigmoid(x: Tensor, gate: Tensor) -> Tensor:
    """Compute x * sigmoid(gate)."""
    out = torch.empty_like(x)
    mul_sigmoid_(x, gate, out)
    return out
